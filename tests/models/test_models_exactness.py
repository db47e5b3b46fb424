"""Law L1 at the level of a model, for each machine: a sequence's logits are the same bits alone or in any batch, in one chunk or
many, in any blocks, with any number of threads, whatever lies in memory that it does not see."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers.machines import ISAS, make_ops
from helpers.single import Bench, TestSequence, config_of, pack_weights
from helpers.tiny_models import TinyModel
from kvist.kernels.ops import F32, PARTITION, SPAN, Ops, PackedLinear

TINY = TinyModel("qwen2", layers=2, hidden=64, heads=6, kv_heads=2, head_dim=32, intermediate=96, vocab=170, tied=False)
WINDOWED = TinyModel("qwen3", layers=6, hidden=32, heads=3, kv_heads=1, head_dim=32, intermediate=64, vocab=100)
WINDOWS = (20, 20, 20, 20, 20, None)
FORMATS = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("w8a8", "bf16"), ("w4a8", "f16")]
FORMATS_OF_THE_TWIN = [("f32", "f32"), ("w8a8", "bf16"), ("w4a8", "f16")]
"""Its dense products are slow, and differ by how a weight is widened only."""
each_format = pytest.mark.parametrize(
    ("isa", "weight_format", "kv_format"),
    [(isa, *formats) for isa in ISAS for formats in (FORMATS_OF_THE_TWIN if isa == "numpy" else FORMATS)],
)
LENGTH = 150


@cache
def packed(tiny: TinyModel, weight_format: str) -> tuple[dict[str, PackedLinear], dict[str, F32]]:
    return pack_weights(tiny.weights(), weight_format)


def bench(ops: Ops, weight_format: str = "w8a8", kv_format: str = "bf16", **options: Any) -> Bench:
    return Bench(config_of(TINY), *packed(TINY, weight_format), ops, kv_format=kv_format, **options)


def windowed(ops: Ops, kv_format: str = "bf16", **options: Any) -> Bench:
    return Bench(config_of(WINDOWED, layer_windows=WINDOWS), *packed(WINDOWED, "w8a8"), ops, kv_format=kv_format, **options)


def some_tokens(seed: int, length: int = LENGTH, vocab: int = TINY.size) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def alone(machine: Bench, tokens: list[int]) -> F32:
    """All logits of a sequence that has the machine to itself, in one chunk."""
    sequence = machine.sequence()
    logits = machine.run(sequence, tokens)
    machine.release(sequence)
    assert np.isfinite(logits).all()
    return logits


def same_bits(one: F32, other: F32) -> None:
    assert one.shape == other.shape
    different = (one.view(np.uint32) != other.view(np.uint32)).any(axis=-1)
    assert not different.any(), f"rows {np.flatnonzero(different).tolist()} differ"


@each_format
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_do_not_matter(ops: Ops, weight_format: str, kv_format: str, chunk: int) -> None:
    machine = bench(ops, weight_format, kv_format)
    tokens = some_tokens(1, LENGTH if chunk > 1 else SPAN + 6)
    same_bits(machine.run(machine.sequence(), tokens, chunk), alone(machine, tokens))


@each_format
def test_chunks_do_not_matter_across_partitions(ops: Ops, weight_format: str, kv_format: str) -> None:
    machine = bench(ops, weight_format, kv_format)
    tokens = some_tokens(2, PARTITION + SPAN + 9)
    chunks = [PARTITION - 3, 1, 1, 1, 1, 1, SPAN - 3, 1, 1, 1, 1, 1, 200]
    same_bits(machine.run(machine.sequence(), tokens, chunks), alone(machine, tokens))


@each_format
def test_company_does_not_matter(ops: Ops, weight_format: str, kv_format: str) -> None:
    """Steps of 2 .. 33 rows: some sequences decode, some are in the middle of their prompt, some begin."""
    machine, rng = bench(ops, weight_format, kv_format), np.random.default_rng(3)
    prompts = [some_tokens(100 + i) for i in range(8)]
    expected = [alone(machine, tokens) for tokens in prompts]
    sequences = [machine.sequence() for _ in prompts]
    machine.step([(sequences[i], prompts[i][: 5 + 17 * i]) for i in range(2, 8)])
    mixed = began = 0
    for rows in range(2, 34):
        counts = split(rows, rng)
        chosen = rng.permutation(8)[: len(counts)]
        for i, count in zip(chosen, counts, strict=True):
            if sequences[i].length + count > LENGTH:
                machine.release(sequences[i])
        starts = [sequences[i].length for i in chosen]
        results = machine.step([(sequences[i], prompts[i][s : s + n]) for i, s, n in zip(chosen, starts, counts, strict=True)])
        assert sum(map(len, results)) == rows
        for i, start, count, result in zip(chosen, starts, counts, results, strict=True):
            same_bits(result, expected[i][start : start + count])
        mixed, began = mixed + (1 in counts and max(counts) > 1), began + (0 in starts)
    assert mixed >= 10
    assert began >= 2


def split(rows: int, rng: np.random.Generator) -> list[int]:
    """Rows shared out to 2 .. 8 sequences, most of them one row each."""
    count = min(rows, int(rng.integers(2, 9)))
    counts = [1] * count
    for _ in range(rows - count):
        counts[int(rng.integers(0, max(1, count // 2)))] += 1
    rng.shuffle(counts)
    return counts


@each_format
def test_steps_of_a_busy_machine(ops: Ops, weight_format: str, kv_format: str) -> None:
    """Sequences that come, go on by odd chunks, are preempted and come again, in blocks that others have used before."""
    rng = np.random.default_rng(4)
    machine = bench(ops, weight_format, kv_format, num_blocks=40, order=rng.permutation(40).tolist())
    prompts = [some_tokens(200 + i, 60 + 9 * i) for i in range(5)]
    expected = [alone(machine, tokens) for tokens in prompts]
    active: dict[int, TestSequence] = {}
    preempted = finished = 0
    for _ in range(60):
        for i in rng.permutation(5)[: rng.integers(1, 6)]:
            active.setdefault(int(i), machine.sequence())
        chunks = {i: prompts[i][s.length : s.length + int(rng.choice([1, 1, 2, 5, 19, 33]))] for i, s in active.items()}
        starts = {i: sequence.length for i, sequence in active.items()}
        results = machine.step([(active[i], chunks[i]) for i in chunks])
        for i, result in zip(chunks, results, strict=True):
            same_bits(result, expected[i][starts[i] : starts[i] + len(chunks[i])])
            done = active[i].length == len(prompts[i])
            if done or rng.random() < 0.05:
                finished, preempted = finished + done, preempted + (not done)
                machine.release(active.pop(i))
    assert finished >= 5
    assert preempted >= 5


@each_format
def test_blocks_do_not_matter(ops: Ops, weight_format: str, kv_format: str) -> None:
    tokens = some_tokens(5)
    expected = alone(bench(ops, weight_format, kv_format), tokens)
    for block_size in (16, 32, 64):
        order = np.random.default_rng(block_size).permutation(64).tolist()
        machine = bench(ops, weight_format, kv_format, block_size=block_size, num_blocks=64, order=order)
        sequence = machine.sequence()
        same_bits(machine.run(sequence, tokens, 31), expected)
        assert sequence.tables == [order[: -(-LENGTH // block_size)]]


@each_format
def test_threads_do_not_matter(isa: str, weight_format: str, kv_format: str) -> None:
    tokens, company = some_tokens(6), some_tokens(7, 40)
    results = []
    for threads in (1, 2, 3):
        ops = make_ops(isa, threads)
        assert ops.num_threads == threads
        machine = bench(ops, weight_format, kv_format)
        chunk = alone(machine, tokens)
        results.append(np.concatenate([chunk, *machine.step([(machine.sequence(), tokens), (machine.sequence(), company)])]))
    same_bits(results[1], results[0])
    same_bits(results[2], results[0])


@pytest.mark.parametrize("kv_format", ["f32", "f16", "bf16"])
def test_what_is_not_seen_does_not_matter(ops: Ops, kv_format: str) -> None:
    """NaNs in free memory (as everywhere in these tests), zeros, ones, or the leftovers of others."""
    tokens = some_tokens(8, 75)
    expected = alone(bench(ops, "w8a8", kv_format), tokens)
    for byte in (0x00, 0x7C, 0x3F):
        machine = bench(ops, "w8a8", kv_format, num_blocks=5)
        machine.arena.blocks[...] = byte
        same_bits(machine.run(machine.sequence(), tokens, [70, 1, 1, 1, 1, 1]), expected)


@pytest.mark.parametrize("kv_format", ["f32", "f16", "bf16"])
def test_a_broken_token_harms_no_earlier_row_and_no_other_sequence(ops: Ops, kv_format: str) -> None:
    """A token whose embedding is infinite puts NaNs into keys and values right behind what the rows before it see."""
    linears, vectors = pack_weights(TINY.weights(), "w8a8")
    healthy = TINY.weights()["model.embed_tokens.weight"]
    healthy[99] = np.inf
    linears = linears | {"embed": pack_weights({"model.embed_tokens.weight": healthy})[0]["embed"]}
    machine = Bench(config_of(TINY), linears, vectors, ops, kv_format=kv_format)
    fine, bystander = ([t for t in some_tokens(seed, 90) if t != 99] for seed in (9, 10))
    expected, expected_bystander = alone(machine, fine), alone(machine, bystander)
    for position in (0, 1, 15, 16, 17, 40, 63, 64, 70):
        sequence, other = machine.sequence(), machine.sequence()
        broken = [*fine[:position], 99, *fine[position:80]]
        result, result_bystander = machine.step([(sequence, broken), (other, bystander)])
        same_bits(result[:position], expected[:position])
        same_bits(result_bystander, expected_bystander)
        assert not np.isfinite(result[position:]).any()
        machine.release(sequence)
        machine.release(other)


@pytest.mark.parametrize("kv_format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_windowed_groups_let_go_of_what_they_do_not_see(ops: Ops, kv_format: str, chunk: int) -> None:
    """Five windowed layers to one full layer; after each chunk the blocks behind the windows are NaNs and other people's."""
    machine = windowed(ops, kv_format, num_blocks=100, order=range(1, 100))
    assert [group.window for group in machine.spec.groups] == [None, *[20] * 5]
    tokens = some_tokens(11, LENGTH if chunk > 1 else 2 * SPAN + 3, WINDOWED.size)
    expected = alone(machine, tokens)
    sequence, results, gone = machine.sequence(), [], 0
    for start in range(0, len(tokens), chunk):
        results += machine.step([(sequence, tokens[start : start + chunk])])
        gone += machine.let_go(sequence)
    same_bits(np.concatenate(results), expected)
    assert gone == 5 * ((len(tokens) - 19) // 16)


def test_windowed_rows_among_others(ops: Ops) -> None:
    machine = windowed(ops, order=np.random.default_rng(12).permutation(128).tolist())
    prompts = [some_tokens(300 + i, 70, WINDOWED.size) for i in range(4)]
    expected = [alone(machine, tokens) for tokens in prompts]
    sequences = [machine.sequence() for _ in prompts]
    for chunks in ([1, 21, 40, 5], [1, 1, 1, 1], [30, 5, 1, 40], [20, 43, 28, 1]):
        starts = [sequence.length for sequence in sequences]
        results = machine.step([(s, p[s.length : s.length + n]) for s, p, n in zip(sequences, prompts, chunks, strict=True)])
        for i, result in enumerate(results):
            same_bits(result, expected[i][starts[i] : starts[i] + chunks[i]])
            machine.let_go(sequences[i])


def test_rows_read_what_was_written_to_the_cache(ops: Ops) -> None:
    """A coarser cache changes logits from the first row on: no row ever sees fresh keys or values, not even its own."""
    tokens = some_tokens(13, 20)
    exact, coarse = (alone(bench(ops, "f32", kv_format), tokens) for kv_format in ("f32", "bf16"))
    assert (np.abs(exact - coarse).max(axis=1) > 1e-4).all()
