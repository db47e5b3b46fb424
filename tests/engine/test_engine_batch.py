"""The exact arrays that a scheduled step becomes."""

from __future__ import annotations

import random
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.batch import TABLE_STEP, BatchBuilder
from kvist.kernels.ops import ForwardBatch
from kvist.sched.output import ScheduledRequest


def scheduled(name: str, token_ids: list[int], start: int, *tables: list[int]) -> ScheduledRequest:
    return ScheduledRequest(name, token_ids, start, tuple(array("I", table) for table in tables), samples=True)


def build_batch(items: list[ScheduledRequest], block_size: int, num_groups: int) -> ForwardBatch:
    return BatchBuilder(block_size, num_groups).build(items)


def tables(batch: ForwardBatch, *lengths: int) -> list[list[list[int]]]:
    """Of each group, each sequence's table up to its length."""
    return [[row[:length].tolist() for row, length in zip(group.block_table, lengths, strict=True)] for group in batch.groups]


def test_a_decode_row_and_a_chunk():
    batch = build_batch([scheduled("a", [7], 17, [5, 2]), scheduled("b", [1, 2, 3], 15, [9, 4, 8])], 16, 1)
    assert batch.token_ids.tolist() == [7, 1, 2, 3]
    assert batch.positions.tolist() == [17, 15, 16, 17]
    assert batch.query_start_loc.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == [18, 18]
    assert tables(batch, 2, 3) == [[[5, 2], [9, 4, 8]]]
    assert batch.logit_rows.tolist() == [0, 3]
    assert batch.groups[0].slot_mapping.tolist() == [2 * 16 + 1, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]


def test_each_group_has_its_own_tables():
    batch = build_batch([scheduled("a", [1, 2], 31, [3, 4, 5], [0, 7, 6])], 16, 2)
    assert tables(batch, 3) == [[[3, 4, 5]], [[0, 7, 6]]]
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
    assert tables(batch, 1) == [[[3]]]


def test_a_step_of_the_same_shape_gets_the_same_arrays_with_its_own_numbers():
    builder = BatchBuilder(16, 1)
    first = builder.build([scheduled("a", [1], 15, [3])])
    again = builder.build([scheduled("a", [2], 16, [3, 9])])
    assert again is first
    assert (again.token_ids.tolist(), again.positions.tolist(), again.seq_lens.tolist()) == ([2], [16], [17])
    assert tables(again, 2) == [[[3, 9]]]
    assert again.groups[0].slot_mapping.tolist() == [9 * 16]
    for changed in (
        [scheduled("a", [2, 3], 16, [3, 9])],
        [scheduled("a", [2], 16, [3, 9]), scheduled("b", [2], 0, [4])],
        [scheduled("a", [2], 16 * TABLE_STEP, list(range(TABLE_STEP + 1)))],
        [scheduled("a", [2], 16, [3, 9])._replace(samples=False)],
    ):
        other = builder.build(changed)
        assert other is not first
        assert other.token_ids.tolist() == [token for item in changed for token in item.token_ids]
        assert len(other.logit_rows) == sum(item.samples for item in changed)
        first = other


def assert_same(one: ForwardBatch, other: ForwardBatch, items: list[ScheduledRequest]) -> None:
    """Padding of the tables may differ: it is never read."""
    for field in ("token_ids", "positions", "query_start_loc", "seq_lens", "logit_rows"):
        assert getattr(one, field).tolist() == getattr(other, field).tolist()
    assert [group.block_table.shape for group in one.groups] == [group.block_table.shape for group in other.groups]
    lengths = [len(item.block_tables[0]) for item in items]
    assert tables(one, *lengths) == tables(other, *lengths) == [[item.block_tables[g].tolist() for item in items] for g in (0, 1)]
    assert [g.slot_mapping.tolist() for g in one.groups] == [g.slot_mapping.tolist() for g in other.groups]


def test_built_again_and_again_as_built_alone():
    """Random steps through one builder, and each through one of its own."""
    rng, builder = random.Random(3), BatchBuilder(16, 2)
    for _ in range(200):
        items = []
        for name in "abc"[: rng.randrange(1, 4)]:
            start, count = rng.randrange(200), rng.choice([1, 1, 1, 2, 40])
            blocks = -(-(start + count) // 16)
            ids = [[rng.randrange(99) for _ in range(blocks)] for _ in range(2)]
            items.append(
                scheduled(name, [rng.randrange(9) for _ in range(count)], start, *ids)._replace(samples=rng.random() < 0.8)
            )
        assert_same(builder.build(items), BatchBuilder(16, 2).build(items), items)


STEPS = st.lists(st.sampled_from(["go on", "go on", "go on", "join", "leave", "longer", "chunk", "no sample", "copy"]), max_size=40)


@given(STEPS, st.integers(0, 2**32))
def test_steps_that_go_on_are_as_built_alone(steps: list[str], seed: int):
    """Requests that decode get a row each from step to step, some at the end of a block; others come, go, take a chunk, are not
    drawn from, or have their last block copied."""
    rng, builder = random.Random(seed), BatchBuilder(16, 2)
    lengths: dict[str, int] = {}
    blocks: dict[str, tuple[array[int], array[int]]] = {}
    for number, step in enumerate(["join", *steps]):
        if step == "join":
            lengths[f"r{number}"], blocks[f"r{number}"] = rng.randrange(260), (array("I"), array("I"))
        elif step == "leave" and len(lengths) > 1:
            del lengths[rng.choice(list(lengths))]
        elif step == "longer":
            lengths[rng.choice(list(lengths))] += rng.randrange(200)
        elif step == "copy":
            for table in blocks[rng.choice(list(lengths))]:
                table[-1:] = array("I", [rng.randrange(99)])
        items = []
        for place, (name, start) in enumerate(lengths.items()):
            rows = 5 if step == "chunk" and place == 0 else 1
            lengths[name] = start + rows
            for table in blocks[name]:
                table.extend(rng.randrange(99) for _ in range(-(-(start + rows) // 16) - len(table)))
            samples = not (step == "no sample" and place == 0)
            items.append(ScheduledRequest(name, [rng.randrange(99) for _ in range(rows)], start, blocks[name], samples))
        assert_same(builder.build(items), BatchBuilder(16, 2).build(items), items)
