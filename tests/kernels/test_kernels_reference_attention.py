"""The twin's cache layout byte by byte, rotation and attention against their definitions spelled out with scalars, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention import Case, scattered_case
from helpers.machines import make_ops
from kvist.kernels.ops import F32, PARTITION, SPAN
from kvist.kernels.reference import make_reference_ops
from kvist.kernels.reference_math import decode, encode, rms_norm

f32 = np.float32
KV_FORMATS = ("f32", "f16", "bf16")
OPS = make_ops("numpy")
DOTS = make_reference_ops(bf16_dot=True)


def key_index(case: Case, head: int, offset: int, d: int) -> int:
    """Where element d of a key lies in a layer's K part, counted in elements."""
    tiles, dim = case.block_size // 16, case.dim
    if case.kv_format == "bf16":
        return (((head * tiles + offset // 16) * (dim // 2) + d // 2) * 16 + offset % 16) * 2 + d % 2
    return ((head * tiles + offset // 16) * dim + d) * 16 + offset % 16


def value_index(case: Case, head: int, offset: int, d: int) -> int:
    if case.kv_format == "bf16":
        return ((head * (case.block_size // 2) + offset // 2) * case.dim + d) * 2 + offset % 2
    return (head * case.block_size + offset) * case.dim + d


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_every_key_and_value_has_its_place_and_nothing_else_is_written(kv_format: str, layer: int) -> None:
    case = scattered_case(kv_format, layers=3, kv_heads=2, heads=2, dim=6, lengths=[5, 20, 33], block_size=32)
    arena = case.arena()
    arena[...] = 0xAB
    qkv = case.qkv(1)
    OPS.rope_write(OPS.bind_batch(case.batch()), case.bind(OPS, arena, layer), qkv)
    stored = {"f32": f32, "f16": np.float16, "bf16": np.uint16}[kv_format]
    expected = np.full_like(arena, 0xAB).view(stored)
    part = case.block_size * 2 * 6
    rotated = encode(qkv.reshape(-1, 6, 6), kv_format)
    for t, slot in enumerate(case.batch().groups[0].slot_mapping):
        block, offset = divmod(int(slot), case.block_size)
        for head in range(2):
            for d in range(6):
                start = layer * 2 * part
                expected[block, start + key_index(case, head, offset, d)] = rotated[t, 2 + head, d]
                expected[block, start + part + value_index(case, head, offset, d)] = rotated[t, 4 + head, d]
    assert np.array_equal(arena, expected.view(np.uint8))


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_by_the_letter(rotary_dim: int, norms: bool) -> None:
    case = scattered_case("f32", heads=3, kv_heads=1, dim=8, lengths=[9, 4], rotary_dim=rotary_dim, norms=norms)
    before = case.qkv(2).reshape(-1, 5, 8)
    after = case.qkv(2)
    OPS.rope_write(OPS.bind_batch(case.batch()), case.bind(OPS, case.arena()), after)
    after = after.reshape(-1, 5, 8)
    params, half = case.params(), rotary_dim // 2
    for t, position in enumerate(case.batch().positions):
        for head in range(4):
            x = before[t, head]
            if norms:
                weight = params.q_norm if head < 3 else params.k_norm
                assert weight is not None
                x = rms_norm(x[None], weight, params.norm_eps)[0]
            expected = x.copy()
            for i in range(half):
                cos, sin = params.cos[position, i], params.sin[position, i]
                expected[i] = x[i] * cos - x[i + half] * sin
                expected[i + half] = x[i + half] * cos + x[i] * sin
            assert np.array_equal(after[t, head], expected)
        assert np.array_equal(after[t, 4], before[t, 4])


def as_bf16(x: F32) -> F32:
    return decode(encode(np.asarray(x), "bf16"), "bf16")


def by_pairs(index: int) -> int:
    """Sorts the second of each pair before the first."""
    return index ^ 1


def scalar_attention(q: F32, keys: F32, values: F32, position: int, window: int | None, dots: bool = False) -> F32:
    """One row and head by the letter; q is scaled, keys and values [n, dim] begin at position 0. With `dots`, q and the weights are
    rounded, and neighbours change places before they are added up."""
    kept, turn = (as_bf16, by_pairs) if dots else (np.asarray, None)
    q = kept(q)
    low = 0 if window is None else max(0, position - window + 1)
    partials = []
    for partition in range(low // PARTITION * PARTITION, position + 1, PARTITION):
        m, l, acc = f32(-np.inf), f32(0), np.zeros_like(q)  # noqa: E741
        for span in range(partition, partition + PARTITION, SPAN):
            visible = [key for key in range(span, span + SPAN) if low <= key <= position]
            if not visible:
                continue
            scores = {}
            for key in visible:
                scores[key] = f32(0)
                for d in sorted(range(len(q)), key=turn):
                    scores[key] = scores[key] + q[d] * keys[key, d]
            m_new = max(m, *scores.values())
            alpha = np.exp(m - m_new)
            p = {key: kept(np.exp(score - m_new)) for key, score in scores.items()}
            lanes = [f32(0)] * 16
            for key in visible:
                lanes[key % 16] = lanes[key % 16] + p[key]
            while len(lanes) > 1:
                lanes = [a + b for a, b in zip(lanes, lanes[len(lanes) // 2 :], strict=False)]
            m, l, acc = m_new, l * alpha + lanes[0], acc * alpha  # noqa: E741
            for key in sorted(visible, key=turn):
                acc = acc + p[key] * values[key]
        partials.append((m, l, acc))
    top = max(m for m, _, _ in partials)
    total, out = f32(0), np.zeros_like(q)
    for m, l, acc in partials:  # noqa: E741
        total, out = total + l * np.exp(m - top), out + acc * np.exp(m - top)
    return out / total


@pytest.mark.parametrize(("kv_format", "dots"), [*((name, False) for name in KV_FORMATS), ("bf16", True)])
@pytest.mark.parametrize("window", [None, 1, 20, 69, PARTITION + 30])
def test_attention_by_the_letter(kv_format: str, dots: bool, window: int | None) -> None:
    """Two sequences in a batch: 3 rows at the end of one that spans partitions, 2 rows of one that has just begun."""
    case = scattered_case(kv_format, heads=4, kv_heads=2, dim=4, lengths=[PARTITION + 70, 2], window=window)
    arena, keys, values = case.filled(OPS, seed=3)
    rows = [3, 2]
    qkv, out = case.qkv(4, sum(rows)), np.empty((5, 16), f32)
    ops = DOTS if dots else OPS
    ops.attend(ops.bind_batch(case.batch(rows)), case.bind(ops, arena), qkv, out)
    result, q, t = out.reshape(5, 4, 4), qkv.reshape(5, 8, 4)[:, :4] * f32(0.5), 0
    for s, count in enumerate(rows):
        for position in range(case.lengths[s] - count, case.lengths[s]):
            for head in range(4):
                expected = scalar_attention(q[t, head], keys[s][:, head // 2], values[s][:, head // 2], position, window, dots)
                assert np.array_equal(result[t, head], expected), (position, head)
            t += 1
    assert t == 5


def test_attention_is_a_softmax() -> None:
    case = scattered_case("f32", heads=6, kv_heads=2, dim=10, lengths=[700])
    arena, keys, values = case.filled(OPS, seed=5)
    qkv, out = case.qkv(6, 700), np.empty((700, 60), f32)
    OPS.attend(OPS.bind_batch(case.batch()), case.bind(OPS, arena), qkv, out)
    q = qkv.reshape(700, 10, 10)[:, :6].astype(float)
    scores = np.einsum("tgrd,sgd->grts", q.reshape(700, 2, 3, 10), keys[0].astype(float)) / np.sqrt(10)
    scores[:, :, np.triu(np.ones((700, 700), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("grts,sgd->tgrd", weights, values[0].astype(float)).reshape(700, 60)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)


def test_bf16_dots_change_what_bf16_caches_give_and_nothing_else() -> None:
    for kv_format in KV_FORMATS:
        case = scattered_case(kv_format, heads=2, kv_heads=1, dim=16, lengths=[70])
        arena, _, _ = case.filled(OPS, seed=8)
        qkv, outs = case.qkv(9, 3), [np.empty((3, 32), f32) for _ in range(2)]
        for ops, out in zip((OPS, DOTS), outs, strict=True):
            ops.attend(ops.bind_batch(case.batch([3])), case.bind(ops, arena), qkv, out)
        assert np.array_equal(*outs) == (kv_format != "bf16")
        np.testing.assert_allclose(*outs, rtol=0, atol=0.05)
    assert OPS.profile != DOTS.profile


def test_what_filled_returns_is_what_the_cache_holds() -> None:
    """Keeps the helper honest: a value that bf16 cannot hold comes back rounded."""
    case = scattered_case("bf16", heads=1, kv_heads=1, dim=4, lengths=[40])
    _, keys, values = case.filled(OPS, seed=7)
    for array in (keys[0], values[0]):
        assert np.array_equal(decode(encode(array, "bf16"), "bf16"), array)
