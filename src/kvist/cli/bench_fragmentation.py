"""`kvist bench fragmentation`: what each allocator wastes of the KV memory, as a table, JSON and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvist.cli.options import JsonFlag
from kvist.cli.params import option
from kvist.cli.terminal import print_json, progress
from kvist.config import KV_ALLOCATORS
from kvist.kv.spec import KVSpec, group_layers

SPEC = KVSpec(num_kv_heads=3, head_dim=64, kv_format="bf16", block_size=16, groups=group_layers((None,) * 30))
"""The default model's."""
LINES = (
    ("internal fragmentation", "internal_fragmentation", ".2%"),
    ("external fragmentation", "external_fragmentation", ".2%"),
    ("reserved", "reserved_share", ".0%"),
    ("committed", "committed_share", ".0%"),
    ("held by live requests", "held_share", ".0%"),
    ("used", "used_share", ".0%"),
    ("shared", "shared_share", ".1%"),
    ("requests at once", "mean_running", ".1f"),
    ("tokens a step", "tokens_per_step", ".1f"),
    ("preemptions", "preemptions", "d"),
)
"""What a row says, the figure, and its format."""


def fragmentation_command(
    requests: Annotated[int, option(min=10, help="Chats in the crowd.")] = 400,
    num_kv_blocks: Annotated[int, option(min=130, help="Size of the pool, in blocks of 16 tokens.")] = 1000,
    max_num_seqs: Annotated[int, option(min=1, help="Most requests that run at once.")] = 64,
    seed: Annotated[int, option(help="Seed of the crowd; the figures depend on nothing else.")] = 0,
    plot: Annotated[Path | None, option(metavar="FILE.png", help="Draw memory over time.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """One crowd of short chats through the engine's scheduler with each allocator: what is reserved, held and used.

    No model runs: block ids, not tokens, are what is measured, on the default model's block size in bytes.
    """
    from kvist.bench import fragmentation, render

    if plot is not None:
        render.check_plot(plot)
    chats = fragmentation.draw_chats(requests, seed)
    runs = []
    with progress("Serving the crowd", len(KV_ALLOCATORS)) as update:
        for done, allocator in enumerate(KV_ALLOCATORS):
            update(done)
            runs.append(fragmentation.run_crowd(allocator, chats, SPEC, num_kv_blocks, max_num_seqs=max_num_seqs, budget=512))
    if plot is not None:
        fragmentation.plot(runs, plot)
    rows = [run.as_dict() for run in runs]
    if as_json:
        crowd = {"requests": requests, "seed": seed, "num_kv_blocks": num_kv_blocks, "max_num_seqs": max_num_seqs}
        return print_json({"command": "fragmentation", **crowd, "runs": rows})
    from rich.console import Console
    from rich.table import Table

    table = Table("of the pool, on average", *(str(row["allocator"]) for row in rows))
    for text, name, form in LINES:
        table.add_row(text, *(format(row[name], form) for row in rows))
    Console().print(table)
    return None
