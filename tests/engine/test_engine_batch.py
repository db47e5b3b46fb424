"""The exact arrays that a scheduled step becomes."""

from __future__ import annotations

from array import array

import numpy as np

from kvist.engine.batch import build_batch
from kvist.sched.output import ScheduledRequest


def scheduled(name: str, token_ids: list[int], start: int, *tables: list[int]) -> ScheduledRequest:
    return ScheduledRequest(name, token_ids, start, tuple(array("i", table) for table in tables), samples=True)


def test_a_decode_row_and_a_chunk():
    batch = build_batch([scheduled("a", [7], 17, [5, 2]), scheduled("b", [1, 2, 3], 15, [9, 4, 8])], 16, 1)
    assert batch.token_ids.tolist() == [7, 1, 2, 3]
    assert batch.positions.tolist() == [17, 15, 16, 17]
    assert batch.query_start_loc.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == [18, 18]
    assert batch.groups[0].block_table.tolist() == [[5, 2, 0], [9, 4, 8]]
    assert batch.groups[0].slot_mapping.tolist() == [2 * 16 + 1, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]


def test_each_group_has_its_own_tables():
    batch = build_batch([scheduled("a", [1, 2], 31, [3, 4, 5], [0, 7, 6])], 16, 2)
    assert [group.block_table.tolist() for group in batch.groups] == [[[3, 4, 5]], [[0, 7, 6]]]
    assert [group.slot_mapping.tolist() for group in batch.groups] == [[4 * 16 + 15, 5 * 16], [7 * 16 + 15, 6 * 16]]


def test_kinds_of_the_arrays():
    batch = build_batch([scheduled("a", [1], 0, [0])], 16, 1)
    for array_ in (batch.token_ids, batch.positions, batch.query_start_loc, batch.seq_lens, batch.groups[0].block_table):
        assert array_.dtype == np.int32
        assert array_.flags.c_contiguous
    assert batch.groups[0].slot_mapping.dtype == np.int64


def test_tables_are_copied():
    """The manager's own tables grow in the next step; the batch must neither follow nor forbid it."""
    item = scheduled("a", [1], 0, [3])
    batch = build_batch([item], 16, 1)
    item.block_tables[0].extend([4] * 100)
    item.block_tables[0][0] = 9
    assert batch.groups[0].block_table.tolist() == [[3]]
