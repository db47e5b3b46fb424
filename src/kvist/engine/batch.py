"""Lowers what the scheduler decided (integers and growing arrays) to what a model reads (one `ForwardBatch`).

It decides nothing and touches no logits. Invariants: sequence s of the batch is `scheduled[s]`, its rows in order of position;
block tables are copied (the manager's own may grow in the next step); padding is block 0 and is never read.

Lists are filled in Python and become arrays once each: a step of one row would otherwise spend more on array operations than on
anything else, and a chunk has a few blocks only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvist.kernels.ops import I32, ForwardBatch, GroupTables
from kvist.sched.output import ScheduledRequest


def build_batch(scheduled: Sequence[ScheduledRequest], block_size: int, num_groups: int) -> ForwardBatch:
    """The step's rows, in the scheduler's order. `scheduled` is not empty."""
    token_ids: list[int] = []
    positions: list[int] = []
    query_start_loc, seq_lens, logit_rows = [0], [], []
    for item in scheduled:
        token_ids += item.token_ids
        stop = item.start + len(item.token_ids)
        positions += range(item.start, stop)
        query_start_loc.append(len(token_ids))
        seq_lens.append(stop)
        if item.samples:
            logit_rows.append(len(token_ids) - 1)
    groups = []
    for group in range(num_groups):
        slots: list[int] = []
        for item, stop in zip(scheduled, seq_lens, strict=True):
            _append_slots(slots, item.block_tables[group], item.start, stop, block_size)
        table = pad_tables([item.block_tables[group] for item in scheduled])
        groups.append(GroupTables(table, np.array(slots, np.int64)))
    rows, sequences = len(token_ids), len(seq_lens)
    # One array, of which the others are parts: making an array costs more than what is in it.
    together = np.array(token_ids + positions + query_start_loc + seq_lens + logit_rows, np.int32)
    lengths, wanted = 2 * rows + sequences + 1, 2 * rows + 2 * sequences + 1
    return ForwardBatch(
        token_ids=together[:rows],
        positions=together[rows : 2 * rows],
        query_start_loc=together[2 * rows : lengths],
        seq_lens=together[lengths:wanted],
        groups=tuple(groups),
        logit_rows=together[wanted:],
    )


def _append_slots(slots: list[int], table: array[int], start: int, stop: int, block_size: int) -> None:
    """The slots of positions [start, stop), block by block."""
    while start < stop:
        block, offset = divmod(start, block_size)
        first = table[block] * block_size + offset
        count = min(block_size - offset, stop - start)
        slots += range(first, first + count)
        start += count


def pad_tables(tables: Sequence[array[int]]) -> I32:
    """int32 [sequences, longest table], filled with block 0 where a table is shorter; read-only."""
    width = max(map(len, tables))
    rows = b"".join([table.tobytes().ljust(4 * width, b"\0") for table in tables])
    return np.frombuffer(rows, np.int32).reshape(len(tables), width)
