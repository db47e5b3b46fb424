"""`kvist bench compare` and `kvist bench show`: kvist and other engines side by side, and what was saved of it shown again.

It turns flags into contenders and the outcome into a table, Markdown, JSON and a plot. Who is there and what each runs is
`bench/peer_setup.py`'s, the turns `bench/compare.py`'s.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from kvist.bench.workloads import FRESH_WORKS, SEED, WORKS, Work, choose_works
from kvist.cli.fetching import fetch
from kvist.cli.options import JsonFlag, engine_options, read_text, takes
from kvist.cli.params import argument, option
from kvist.cli.terminal import dim, print_json, say
from kvist.config import DEFAULT_MODEL, EngineOptions, ModelConfig
from kvist.errors import EngineError, UsageError
from kvist.machine import available_cpus

ALL = (*WORKS, *FRESH_WORKS)
BUSY_LOAD = 0.3
"""Load a core, by the system's one-minute average, above which figures are not worth much."""

PlotFile = Annotated[Path | None, option(metavar="FILE.png", help="Draw a plot; needs kvist[bench].")]
MarkdownFlag = Annotated[bool, option("--markdown", help="Print the table as Markdown.")]


def _shaped(engine: EngineOptions, shape: str | None) -> EngineOptions:
    """The options with the random model of a shape in the model's place, made on first use."""
    if shape is None:
        return engine
    from kvist.bench.model_files import bench_dir
    from kvist.bench.random_model import SHAPES, write_random_model
    from kvist.weights.hub import resolve_model

    if shape not in SHAPES:
        raise UsageError(f"{shape!r} is no shape; choose among {', '.join(SHAPES)}.")
    if engine.model != DEFAULT_MODEL:
        raise UsageError("--shape makes its own model; leave --model away.")
    path = bench_dir() / f"random-{shape}-q4_0.gguf"
    if not path.exists():
        say(dim(f"making {path}"))
        write_random_model(path, SHAPES[shape], resolve_model(DEFAULT_MODEL))
    return replace(engine, model=str(path))


def _print(report: dict[str, Any], as_json: bool, as_markdown: bool) -> None:
    from kvist.bench.render import cells, footnotes, markdown, roofline_cells

    if as_json:
        return print_json(report)
    if as_markdown:
        return print(markdown(report))
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    for header, rows in (cells(report), roofline_cells(report)):
        table = Table(*(Column(name, overflow="fold") for name in header))
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
    for line in footnotes(report):
        console.print(line, highlight=False, markup=False)
    return None


def _run(
    engine: EngineOptions, peers: dict[str, Path], chosen: list[Work], rounds: int, also_4_bit: bool, timeout: float
) -> dict[str, Any]:
    from kvist.bench.compare import compare, summarize
    from kvist.bench.machine import NO_BYTECODE, has_bytecode, machine_facts
    from kvist.bench.peer_setup import enter
    from kvist.weights.hub import resolve_model
    from kvist.weights.source import open_model

    fetch(engine.model)
    model = resolve_model(engine.model)
    config = open_model(model).config
    begun, load = time.monotonic(), os.getloadavg()[0]
    if load > BUSY_LOAD * available_cpus():
        say(f"This machine is busy (load {load:.1f}): the figures will be too low and will differ from run to run.")
    if any(work.counts == "start" for work in chosen) and not has_bytecode():
        say(NO_BYTECODE)
    entry = enter(engine, model, peers, also_4_bit=also_4_bit, say=lambda message: say(dim(message)))
    result = compare(
        entry.contenders, chosen, rounds, vocab_size=config.vocab_size, report=lambda message: say(dim(message)), timeout=timeout
    )
    failures = [*entry.failures, *result.failures]
    rows = summarize(result)
    return {
        "command": "compare",
        "machine": machine_facts(),
        "load": round(load, 2),
        "model": {"name": model.stem if engine.model != DEFAULT_MODEL else engine.model, "bytes": _size(model)},
        "rounds": rounds,
        "interrupted": result.interrupted,
        "seed": SEED,
        "num_threads": engine.num_threads or available_cpus(),
        "contenders": [
            {"name": one.name, "weights": one.weights, "facts": result.facts.get(one.name, {})} for one in entry.contenders
        ],
        "works": rows,
        "roofline": _roofline(engine, model, config, rows),
        "failures": [{"contender": one.contender, "work": one.work, "reason": one.reason} for one in failures],
        "seconds": round(time.monotonic() - begun, 1),
    }


def _roofline(engine: EngineOptions, model: Path, config: ModelConfig, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """kvist's figures as bytes and operations a second. None where the bytes of the weights that it reads are not the file's."""
    from kvist.bench.model_files import read_bytes
    from kvist.bench.roofline import model_cost, roofline
    from kvist.cli.doctor_report import measured

    if not model.is_file() or engine.quantization is not None or engine.dtype != "auto":
        return None
    cost = model_cost(config, read_bytes(model), engine.kv_cache_dtype)
    medians = {row["work"]: row["medians"]["kvist"] for row in rows if "kvist" in row["medians"]}
    return roofline(WORKS, cost, medians, measured(engine)["read_bytes"])


def _size(model: Path) -> int:
    return model.stat().st_size if model.is_file() else sum(file.stat().st_size for file in model.glob("*.safetensors"))


@takes(engine=engine_options(enable_prefix_caching=False))
def compare_command(
    engine: EngineOptions,
    peer: Annotated[
        list[str] | None,
        option(
            metavar="NAME=FOLDER",
            help="An engine to compare with: openvino, vllm or transformers and its Python environment, or llamacpp and the folder "
            "of its programs. Several times for several engines.",
        ),
    ] = None,
    works: Annotated[str, option(help="Works to run, separated by commas.")] = ",".join(work.name for work in ALL),
    rounds: Annotated[int, option(min=1, help="Rounds; in each, every work is run by one engine after the other.")] = 3,
    shape: Annotated[str | None, option(metavar="1b", help="Instead of a model, random weights in Q4_0 of this shape.")] = None,
    also_4_bit: Annotated[
        bool,
        option(
            "--peer-q4/--no-peer-q4",
            help="Also give llama.cpp and OpenVINO the file requantized to Q4_0, where it is in another 4-bit format.",
        ),
    ] = True,
    timeout: Annotated[float, option(min=1.0, help="Seconds that one measurement, or an engine's start, may take.")] = 900.0,
    save: Annotated[Path | None, option(metavar="FILE.json", help="Save the report; `kvist bench show` reads it.")] = None,
    plot: PlotFile = None,
    as_markdown: MarkdownFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """kvist and other engines on the same model and the same token ids, in turn, each in a process of its own."""
    from kvist.bench.peer_setup import parse_peers
    from kvist.bench.render import check_plot
    from kvist.bench.render import plot as draw

    peers, chosen = parse_peers(peer or ()), choose_works(works, ALL)
    if save is not None and not save.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {save.absolute().parent} to save {save.name} in.")
    if save is not None and save.is_dir():
        raise UsageError(f"{save} is a folder; name a file to save in.")
    if plot is not None:
        check_plot(plot)
    report = _run(_shaped(engine, shape), peers, chosen, rounds, also_4_bit, timeout)
    if save is not None:
        save.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if plot is not None:
        draw(report, plot)
    _print(report, as_json, as_markdown)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if not any("kvist" in row["values"] for row in report["works"]):
        raise EngineError("kvist itself ran none of the works; the reasons stand above.")


def show_command(
    files: Annotated[
        list[Path],
        argument(metavar="FILE.json...", help="What `kvist bench compare --save` wrote; several become one table."),
    ],
    plot: PlotFile = None,
    as_markdown: MarkdownFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show saved comparisons again: as a table, as Markdown, as a plot."""
    from kvist.bench.render import check_plot, merged, read_report
    from kvist.bench.render import plot as draw

    if plot is not None:
        check_plot(plot)
    report = merged([read_report(file, read_text(file)) for file in files])
    if plot is not None:
        draw(report, plot)
    _print(report, as_json, as_markdown)
