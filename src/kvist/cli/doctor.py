"""`kvist doctor`: what this machine offers, which kernels run on it, what is here already, and what to do about what is missing.

It gathers facts and says what follows from them; it changes nothing. Exit status 1 when no native kernels can run, since everything
else still works then, only many times slower. Which builds can run is the kernels' answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import click

from kvist.cli.options import JsonFlag, engine_options, takes
from kvist.cli.params import option
from kvist.cli.terminal import print_json
from kvist.config import EngineOptions
from kvist.errors import UsageError


def _refuse_strays(options: EngineOptions, measure: bool) -> None:
    """No option is taken and ignored: the plain report loads no model."""
    if not measure and options != EngineOptions():
        raise UsageError("--no-measure runs no kernels, so it takes no options of the engine.")
    if replace(options, isa="auto", num_threads=None) != EngineOptions():
        raise UsageError("Only --step and --startup load a model: give one of them, or leave out all but --isa and --num-threads.")


@takes(
    options=engine_options(
        ("model", "dtype", "quantization", "kv_cache_dtype", "num_kv_blocks", "num_threads", "pin_threads", "isa")
    )
)
def doctor(
    *,
    as_json: JsonFlag = False,
    measure: Annotated[
        bool,
        option(help="Measure how fast memory is read and products are computed (two seconds)."),
    ] = True,
    step: Annotated[
        bool,
        option("--step", help="Take one request's decode step apart: Python and native calls, beside the machine's peaks."),
    ] = False,
    context: Annotated[
        int | None, option(metavar="TOKENS", help="With --step: tokens of the prompt that is gone on from; 64 without it.")
    ] = None,
    startup: Annotated[
        bool, option("--startup", help="Take the start apart: from the start of a process to the first token.")
    ] = False,
    options: EngineOptions,
) -> None:
    """Tell what this machine offers and what is missing; or where the time of a step or of a start goes.

    Exit status 1 when no native kernels can run here, 0 otherwise.
    """
    if step and startup:
        raise UsageError("--step and --startup are two reports; ask for one at a time.")
    if not measure and (step or startup):
        raise UsageError("--no-measure is for the plain report; --step and --startup measure.")
    if context is not None and not (step and context > 0):
        raise UsageError("--context takes a number of tokens, at least 1, and belongs to --step.")
    if step:
        from kvist.cli.doctor_step import examine_step, print_step

        _show(examine_step(options, context or 64), print_step, as_json)
    elif startup:
        from kvist.cli.doctor_startup import examine_startup, print_startup

        _show(examine_startup(options), print_startup, as_json)
    else:
        _refuse_strays(options, measure)
        from kvist.cli.doctor_report import examine, print_report

        _show(report := examine(measure, options), print_report, as_json)
        if not report["ok"]:
            raise click.exceptions.Exit(1)


def _show(report: dict[str, Any], print_for_people: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        print_for_people(report)
