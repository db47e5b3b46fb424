"""A recorded program against the same calls made one by one, bit for bit, on every machine; and what a run may not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.machines import ISAS, NATIVE, make_ops, needs_native
from helpers.single import Bench, config_of, pack_weights
from helpers.tiny_models import TinyModel
from kvist.kernels.ops import ForwardBatch, GroupTables, Ops
from kvist.kernels.packing import pack_dense
from kvist.kernels.program import Array, DirectProgram, Embed, GatedMlp, LinearAdd, NormLinear, Take, arrays_of

FAMILIES: dict[str, tuple[TinyModel, dict[str, Any]]] = {
    "grouped queries": (TinyModel("llama", heads=8, kv_heads=2, hidden=64, head_dim=16), {}),
    "biases": (TinyModel("qwen2", heads=6, kv_heads=2, head_dim=32, intermediate=96, tied=False), {}),
    "head norms": (TinyModel("qwen3", heads=3, kv_heads=1, hidden=32, head_dim=32), {}),
    "windows": (TinyModel("mistral", layers=4), {"layer_windows": (20, None, 20, None)}),
}
LENGTHS = (1, 37, 5, 64, 1, 18)


def bench(ops: Ops, family: str, weight_format: str) -> Bench:
    tiny, changes = FAMILIES[family]
    return Bench(config_of(tiny, **changes), *pack_weights(tiny.weights(), weight_format), ops, kv_format="bf16")


def passes(machine: Bench) -> list[ForwardBatch]:
    """Chunks, mixed batches and single rows; some rows' logits, then none, then all."""
    one, two = machine.sequence(), machine.sequence()
    rng = np.random.default_rng(7)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, 100, count).tolist()

    batches = [machine.batch([(one, tokens(length))]) for length in LENGTHS]
    batches += [machine.batch([(two, tokens(40)), (one, tokens(1))]), machine.batch([(one, tokens(1)), (two, tokens(1))])]
    batches[0] = batches[0]._replace(logit_rows=np.empty(0, np.int32))
    batches[1] = batches[1]._replace(logit_rows=np.array([36, 2, 2], np.int32))
    return batches


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weight_format", ["f32", "w4a8"])
def test_a_program_has_the_bits_of_direct_calls(isa: str, family: str, weight_format: str) -> None:
    ops = make_ops(isa, 2)
    recorded, direct = bench(ops, family, weight_format), bench(ops, family, weight_format)
    program = direct.model.program
    by_hand = DirectProgram(ops, program.calls, program.calls[-1].out)  # type: ignore[union-attr]
    for one, other in zip(passes(recorded), passes(direct), strict=True):
        result, expected = recorded.model.forward(one), by_hand.run(other)
        assert result.shape == (len(one.logit_rows), recorded.model.program.calls[-1].out.width)  # type: ignore[union-attr]
        assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(recorded.arena.blocks, direct.arena.blocks)


@pytest.mark.parametrize("isa", ISAS)
def test_timing_changes_no_bit_and_times_each_call(isa: str) -> None:
    plain, timed = (bench(make_ops(isa), "biases", "w8a8") for _ in "ab")
    for one, other in zip(passes(plain), passes(timed), strict=True):
        result, times = timed.model.program.run_timed(other)
        assert len(times) == len(timed.model.program.calls)
        assert times.min() >= 0
        assert times.sum() > 0
        assert np.array_equal(plain.model.forward(one), result)


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_allocated_once_the_arrays_are_large_enough(isa: str) -> None:
    machine = bench(make_ops(isa), "windows", "w8a8")
    arrays = arrays_of(machine.model.program.calls)
    batches = passes(machine)
    machine.model.forward(max(batches, key=lambda batch: batch.num_tokens))
    machine.model.forward(batches[-2])
    before = [array.memory for array in arrays]
    for batch in batches:
        machine.model.forward(batch)
    assert all(array.memory is memory for array, memory in zip(arrays, before, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_a_batch_that_comes_again_with_other_numbers(isa: str) -> None:
    """Also after the shared arrays have grown in between, for many rows' logits or for another batch."""
    machine, fresh = (bench(make_ops(isa), "biases", "w8a8") for _ in "ab")
    one, other = machine.sequence(), fresh.sequence()
    batch = machine.batch([(one, [1])])
    fresh_batch = fresh.batch([(other, [1])])
    for turn in range(4):
        batch.token_ids[0] = fresh_batch.token_ids[0] = 40 + turn
        result = machine.model.forward(batch)
        assert np.array_equal(result, fresh.model.forward(fresh_batch._replace()))
        if turn == 1:
            many = machine.model.logits(batch._replace(logit_rows=np.zeros(64, np.int32))).copy()
            assert np.array_equal(many, np.repeat(machine.model.forward(batch), 64, axis=0))
        if turn == 2:
            machine.model.forward(machine.batch([(machine.sequence(), [5] * 50)]))


def test_arrays_grow_by_half_at_least() -> None:
    array, sizes = Array(3), set()
    for rows in range(1, 100):
        batch = batch_of(rows)
        assert len(array.reserve(batch)) >= rows
        assert array.rows(batch).shape == (rows, 3)
        sizes.add(len(array.memory))
    assert len(sizes) < 15
    taken = Array(2, taken=True)
    taken.reserve(batch := batch_of(5)._replace(logit_rows=np.array([1, 4], np.int32)))
    assert taken.rows(batch).shape == (2, 2)


def batch_of(rows: int) -> ForwardBatch:
    positions = np.arange(rows, dtype=np.int32)
    tables = GroupTables(np.zeros((1, 1), np.int32), np.zeros(rows, np.int64))
    return ForwardBatch(positions * 0, positions, np.array([0, rows], np.int32), np.array([rows], np.int32), (tables,))


@needs_native
def test_what_does_not_fit_is_refused_when_it_is_recorded() -> None:
    ops = make_ops(NATIVE[0])
    square, wide = (ops.bind_linear(pack_dense(np.ones((n, 8), np.float32), "f32")) for n in (8, 24))
    norm, short = np.ones(8, np.float32), np.ones(7, np.float32)
    narrow, x, taken = Array(6), Array(8), Array(8, taken=True)
    for call in (
        Embed(square, narrow),
        Embed(square, taken),
        NormLinear(x, norm, 1e-5, wide, x),
        NormLinear(x, short, 1e-5, square, x),
        NormLinear(x, norm, 1e-5, square, taken),
        LinearAdd(narrow, square, x),
        LinearAdd(x, square, taken),
        GatedMlp(x, norm, 1e-5, square, square),
        Take(narrow, taken),
        Take(x, x),
    ):
        with pytest.raises(ValueError, match=r"match|row|differ"):
            ops.record([call], x)


@needs_native
def test_a_step_that_does_not_fit_is_refused_before_it_computes() -> None:
    machine = bench(make_ops(NATIVE[0]), "grouped queries", "f32")
    batch = machine.batch([(machine.sequence(), [1, 2, 3])])
    machine.arena.blocks[...] = 0
    rows = np.array([3], np.int32)
    for wrong in (
        batch._replace(logit_rows=rows),
        batch._replace(token_ids=np.array([1, 2, 10**6], np.int32)),
        batch._replace(token_ids=np.array([1, 2, -1], np.int32)),
        batch._replace(token_ids=rows),
        batch._replace(groups=()),
        batch._replace(groups=(batch.groups[0]._replace(slot_mapping=np.zeros(2, np.int64)),)),
    ):
        with pytest.raises(ValueError, match="program"):
            machine.model.forward(wrong)
    assert not machine.arena.blocks.any()
    assert np.isfinite(machine.model.forward(batch)).all()
