"""`kvist bench eviction|manager`: what eviction policies find on a trace, and what the KV manager's own work costs.

It turns flags into replays and their results into a table, JSON or a plot; the replays are the bench room's. No model is loaded.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from kvist.bench import eviction, render
from kvist.cli.options import JsonFlag
from kvist.cli.params import option
from kvist.cli.terminal import print_json, progress
from kvist.config import EVICTION_POLICIES, require_one_of
from kvist.errors import UsageError

ALL = ",".join((*sorted(EVICTION_POLICIES), eviction.CLAIRVOYANT))


def _names(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        require_one_of(name, allowed, option)
    if not names:
        raise UsageError(f"{option} names nothing; choose among {', '.join(allowed)}.")
    return names


def _numbers(text: str, option: str, low: float, high: float) -> list[float]:
    try:
        values = [float(part.strip().rstrip("%")) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        raise UsageError(f"{option} takes numbers from {low:g} to {high:g}, separated by commas, not {text!r}.")
    return values


def eviction_command(
    trace: Annotated[
        Path | None, option(help="JSON lines with hash_ids and timestamp (Mooncake's format); without it a made-up trace.")
    ] = None,
    conversations: Annotated[int, option(min=1, help="Length of the made-up trace.")] = 3000,
    seed: Annotated[int, option(help="Seed of the made-up trace.")] = 0,
    policies: Annotated[str, option(help="Policies, separated by commas.")] = ALL,
    sizes: Annotated[
        str, option(help="Pool sizes in % of the trace's distinct blocks, separated by commas.")
    ] = "0.2,0.5,1,2,5,10,20,30,50,100",
    plot: Annotated[Path | None, option(metavar="PNG", help="Draw hit rate against size into this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Blocks found by eviction policy and pool size on a trace of prompts."""
    names = _names(policies, (*sorted(EVICTION_POLICIES), eviction.CLAIRVOYANT), "--policies")
    shares = [size / 100 for size in _numbers(sizes, "--sizes", 1e-6, 100)]
    if plot:
        render.check_plot(plot)
    prompts = eviction.read_trace(trace) if trace else eviction.conversations(conversations, seed)
    rows = []
    with progress("Replaying", len(names) * len(shares)) as update:
        for row in eviction.compare(prompts, names, shares):
            rows.append(row)
            update(len(rows))
    report = eviction.report(prompts, trace.name if trace else f"made up, {conversations} conversations, seed {seed}", rows)
    if plot:
        eviction.plot(rows, plot)
    if as_json:
        print_json(report)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{report['trace']}: {report['requests']:,} requests, {report['blocks']:,} blocks, {report['distinct_blocks']:,} distinct; "
        f"with room for all an index finds {report['unlimited_index_hits']:,}",
        highlight=False,
    )
    table = Table("room, % of distinct", "blocks", *names)
    for position, share in enumerate(shares):
        own = rows[position :: len(shares)]
        table.add_row(f"{100 * share:g}", f"{own[0].num_blocks:,}", *(f"{100 * row.hit_rate:.2f} %" for row in own))
    console.print(table)


def manager_command(
    policies: Annotated[str, option(help="Policies, separated by commas.")] = ",".join(sorted(EVICTION_POLICIES)),
    blocks: Annotated[str, option(help="Pool sizes in blocks, separated by commas.")] = "10000,1000000",
    rounds: Annotated[int, option(min=1, help="Rounds; the median is reported, with the smallest and the largest.")] = 5,
    prompt_tokens: Annotated[int, option(min=16, help="Length of the prompts, rounded down to whole blocks of 16.")] = 1024,
    shared_tokens: Annotated[
        int, option(min=0, help="Of these so many are the same in all prompts, as in a system prompt; rounded down likewise.")
    ] = 0,
    chunk: Annotated[int, option(min=1, help="Rows of a prompt that one step computes.")] = 512,
    memory: Annotated[bool, option(help="Measure host memory too; takes longer.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Cost of the KV manager's own work a block: match, allocate, commit, free; and its host memory."""
    from kvist.bench.manager import BLOCK_SIZE, Mix, measure_manager, measure_memory

    names = _names(policies, EVICTION_POLICIES, "--policies")
    sizes = [int(size) for size in _numbers(blocks, "--blocks", 1024, 1e8)]
    mix = Mix(prompt_tokens // BLOCK_SIZE, chunk, shared_tokens // BLOCK_SIZE)
    if mix.shared_blocks >= mix.prompt_blocks:
        raise UsageError(f"--shared-tokens {shared_tokens} leaves the prompts no block of their own; raise --prompt-tokens.")
    if mix.prompt_blocks >= min(sizes):
        small = int(min(sizes))
        raise UsageError(f"A prompt of {prompt_tokens} tokens does not fit {small} blocks; choose --prompt-tokens or --blocks.")
    rows = []
    with progress("Measuring", len(names) * len(sizes)) as update:
        for name in names:
            for size in sizes:
                cost = measure_manager(size, name, mix=mix, rounds=rounds)
                rows.append({**asdict(cost), "bytes_per_block": measure_memory(size, name, mix=mix) if memory else None})
                update(len(rows))
    if as_json:
        print_json({"command": "manager", "measurements": rows})
        return
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    # Narrow, and only the long headings break: else a million would be cut off where 80 columns are all there are.
    headings = ("policy", "blocks", "µs a block", "min", "max", "new", "repeated", "found", "bytes a block")
    columns = [Column(text, no_wrap=" a " not in text) for text in headings]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        times = row["microseconds"]
        table.add_row(
            row["policy"],
            f"{row['num_blocks']:,}",
            *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))),
            *(f"{statistics.median(row[name]):.2f}" for name in ("new_microseconds", "repeated_microseconds")),
            f"{row['found_share']:.0%}",
            f"{row['bytes_per_block']:.0f}" if row["bytes_per_block"] is not None else "",
        )
    Console().print(table)
