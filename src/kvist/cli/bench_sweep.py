"""`kvist bench sweep`: what the options for batches and threads do to latency and throughput on this machine, as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from kvist.cli.fetching import fetch
from kvist.cli.options import JsonFlag, KeptFile, engine_options, takes
from kvist.cli.params import option
from kvist.cli.terminal import print_json, progress
from kvist.config import EngineOptions, check_options
from kvist.machine import available_cpus


@takes(engine=engine_options(enable_prefix_caching=False))
def sweep_command(
    engine: EngineOptions,
    option: Annotated[
        list[str] | None,
        option(
            metavar="NAME=N,N,...",
            help="An option and its values; several times for several. Without it the three that the page on tuning tells of.",
        ),
    ] = None,
    rounds: Annotated[int, option(min=1, help="Rounds of each value; medians are reported.")] = 3,
    save: KeptFile = None,
    as_markdown: Annotated[bool, option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve the same small crowd with one value of an option after the other."""
    from kvist.bench import machine, sweep
    from kvist.bench.kept import Kept

    settings = sweep.parse_settings(option or (), available_cpus())
    for setting in settings:
        check_options(setting.applied(engine))
    crowd = sweep.Crowd()
    head = {"command": "sweep", "machine": {"cpu": machine.cpu_facts()}, "engine": asdict(engine), "crowd": asdict(crowd)}
    kept = Kept(head, save)
    fetch(engine.model)
    with progress("Measuring", len(settings)) as update:
        rows = sweep.sweep(engine, settings, rounds, update, crowd, kept)
    if as_json:
        return print_json({**head, "machine": machine.machine_facts(), "rounds": rounds, "rows": rows})
    header = ["option", *sweep.COLUMNS.values()]
    shown = [
        [f"--{row['option'].replace('_', '-')} {row['value']}", *(f"{row[name]:,.0f}" for name in sweep.COLUMNS)] for row in rows
    ]
    if as_markdown:
        return print("\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *shown)))
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in shown:
        table.add_row(*row)
    Console().print(table)
    return None
