"""Lowers what the scheduler decided (integers and growing arrays) to what a model reads (one `ForwardBatch`).

It decides nothing and touches no logits. Invariants: sequence s of the batch is `scheduled[s]`, its rows in order of position;
block tables are copied (the manager's own may grow in the next step); padding is block 0 and is never read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvist.kernels.ops import I32, ForwardBatch, GroupTables
from kvist.sched.output import ScheduledRequest


def build_batch(scheduled: Sequence[ScheduledRequest], block_size: int, num_groups: int) -> ForwardBatch:
    """The step's rows, in the scheduler's order. `scheduled` is not empty."""
    counts = np.array([len(item.token_ids) for item in scheduled], np.int32)
    starts = np.array([item.start for item in scheduled], np.int32)
    query_start_loc = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    token_ids = np.fromiter((token for item in scheduled for token in item.token_ids), np.int32, num_tokens)
    sequence_of_row = np.repeat(np.arange(len(scheduled)), counts)
    positions = (np.arange(num_tokens, dtype=np.int32) - query_start_loc[sequence_of_row] + starts[sequence_of_row]).astype(
        np.int32
    )
    groups = []
    for group in range(num_groups):
        table = pad_tables([item.block_tables[group] for item in scheduled])
        slots = table[sequence_of_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        groups.append(GroupTables(table, slots))
    logit_rows = (query_start_loc[1:] - 1)[[item.samples for item in scheduled]]
    return ForwardBatch(token_ids, positions, query_start_loc, starts + counts, tuple(groups), logit_rows)


def pad_tables(tables: Sequence[array[int]]) -> I32:
    """int32 [sequences, longest table], filled with block 0 where a table is shorter."""
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
