"""Each native build against the NumPy twin: integers exactly, floats within bounds that follow from the order of operations.

Native kernels fuse multiply and add, the twin rounds in between; so a sum of N terms may differ by N roundings of the sum of the
terms' sizes. An activation that lies within such a difference of a rounding boundary may fall to the other side, by one step.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention import Case, scattered_case
from helpers.machines import ISAS, NATIVE, make_ops, needs_native, twin_of
from helpers.single import pack
from kvist.kernels.ops import F32, PARTITION, Ops, PackedLinear
from kvist.kernels.packing import pack_w4, pack_w8, unpack
from kvist.kernels.reference_math import decode, quantize_rows, rms_norm, silu

pytestmark = needs_native
f32 = np.float32
EPS = float(np.finfo(f32).eps)
TWIN = make_ops("numpy")
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65)
DENSE = ("f32", "f16", "bf16")
QUANTIZED = ("w8a8", "w4a8")
KV_FORMATS = ("f32", "f16", "bf16")
HEADS = [(3, 3, 64), (9, 3, 64), (8, 1, 64), (4, 2, 80), (2, 1, 128), (6, 2, 96)]


@pytest.fixture(params=NATIVE or ["none"])
def native(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).normal(size=shape).astype(f32)


def both(native: Ops, x: F32, *segments: PackedLinear, start: F32 | None = None) -> tuple[F32, F32]:
    """start + x @ weight.T + bias, natively and by the twin."""
    results = []
    for ops in (native, TWIN):
        linear = ops.bind_linear(*segments)
        out = np.zeros((len(x), linear.n), f32) if start is None else start.copy()
        ops.linear_add(x, linear, out)
        results.append(out)
    return results[0], results[1]


def integer_weight(weight_format: str, n: int, k: int) -> PackedLinear:
    """Whole numbers with unit scales, extremes included."""
    rng = np.random.default_rng(n * 1000 + k)
    one = np.ones((n, k // 32), np.float16)
    if weight_format == "w8a8":
        q = rng.integers(-128, 128, (n, k)).astype(np.int8)
        q[0], q[-1] = -128, 127
        return pack_w8(q, one)
    q = rng.integers(0, 16, (n, k)).astype(np.uint8)
    q[0], q[-1] = 15, 0
    return pack_w4(q, one, rng.integers(-8, 9, (n, k // 32)).astype(np.float16))


def integer_rows(rows: int, k: int) -> F32:
    """Whole numbers whose groups all reach 127, so that they quantize to themselves."""
    x = np.random.default_rng(rows + k).integers(-127, 128, (rows, k)).astype(f32)
    x[:, ::32] = 127
    x[0] = 127
    return x


@pytest.mark.parametrize("weight_format", QUANTIZED)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (15, 96), (16, 64), (17, 160), (48, 32), (100, 576), (33, 960)])
def test_integers_are_exact(native: Ops, weight_format: str, n: int, k: int) -> None:
    weight = integer_weight(weight_format, n, k)
    exact_weight = unpack(weight).astype(np.int64)
    for rows in ROWS:
        x = integer_rows(rows, k)
        exact = x.astype(np.int64) @ exact_weight.T
        assert np.abs(exact).max() < 2**24
        result, twin = both(native, x, weight)
        assert np.array_equal(twin, exact)
        assert np.array_equal(result, exact)


def test_rounding_to_integers_is_the_twins(native: Ops) -> None:
    """Ties and all: a unit weight per element reads the quantized activations back."""
    x = normal(1, 40, 32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5]
    x[1] = 0
    x[2] = 1e-38
    identity = np.eye(32, dtype=np.int8)
    result, twin = both(native, x, pack_w8(identity, np.ones((32, 1), f32)))
    expected = quantize_rows(x)
    assert np.array_equal(twin, expected.q[0] * expected.scale[0, :, None])
    assert np.array_equal(result, twin)


@pytest.mark.parametrize("weight_format", DENSE + QUANTIZED)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 96), (100, 160), (48, 576), (33, 1536)])
def test_products_within_their_bound(native: Ops, weight_format: str, n: int, k: int) -> None:
    weight = pack(normal(2, n, k), weight_format, normal(3, n))
    for rows in ROWS:
        x, start = normal(rows, rows, k), normal(rows + 1, rows, n)
        result, twin = both(native, x, weight, start=start)
        np.testing.assert_array_less(np.abs(result - twin), product_bound(x, weight) + 2 * EPS * (np.abs(twin) + np.abs(start)))


def product_bound(x: F32, weight: PackedLinear) -> F32:
    """What the roundings of a row times a column add up to; they go both ways, so N of them grow as the root of N."""
    if weight.format in DENSE:
        return 2 * EPS * weight.k**0.5 * (np.abs(x) @ np.abs(unpack(weight)).T) + 1e-30
    groups = np.abs(unpack(weight)).reshape(weight.n, -1, 32).max(axis=-1)
    return 16 * EPS * (weight.k / 32) ** 0.5 * (np.abs(x.reshape(len(x), -1, 32)).sum(axis=-1) @ groups.T) + 1e-30


@pytest.mark.parametrize("weight_format", DENSE)
@pytest.mark.parametrize("k", [1, 8, 30, 33, 100])
def test_dense_widths_that_divide_by_nothing(native: Ops, weight_format: str, k: int) -> None:
    weight = pack(normal(4, 19, k), weight_format)
    x, norm = normal(5, 7, k), 1 + 0.1 * normal(6, k)
    result, twin = both(native, x, weight)
    np.testing.assert_array_less(np.abs(result - twin), product_bound(x, weight))
    results = [np.empty((7, 19), f32) for _ in "ab"]
    for ops, out in zip((native, TWIN), results, strict=True):
        ops.norm_linear(x, norm, 1e-5, ops.bind_linear(weight), out)
    np.testing.assert_array_less(np.abs(results[0] - results[1]), 8 * product_bound(rms_norm(x, norm, 1e-5), weight))


def hold_products(result: F32, twin: F32, h: F32, weights: list[PackedLinear], flips: int) -> None:
    """Within the product's bound (and what h itself was rounded by); in a few rows, one activation more or less by a step."""
    difference = np.abs(result - twin)
    bound = 8 * np.hstack([product_bound(h, weight) for weight in weights]) + 2 * EPS * np.abs(twin)
    if weights[0].format in DENSE:
        np.testing.assert_array_less(difference, bound)
        return
    step = np.abs(h.reshape(len(h), -1, 32)).max(axis=(1, 2)) / 127
    flipped = flips * step[:, None] * np.hstack([np.abs(unpack(weight)).max(axis=1) for weight in weights])
    np.testing.assert_array_less(difference, bound + flipped)
    assert (difference < bound).all(axis=1).mean() > 0.9


@pytest.mark.parametrize("weight_format", DENSE + QUANTIZED)
def test_norm_linear_over_segments(native: Ops, weight_format: str) -> None:
    for rows in ROWS:
        x, norm = 3 * normal(rows, rows, 96), 1 + 0.1 * normal(7, 96)
        parts = [pack(normal(8 + n, n, 96), weight_format) for n in (33, 16, 5)]
        results = [np.empty((rows, 54), f32) for _ in "ab"]
        for ops, out in zip((native, TWIN), results, strict=True):
            ops.norm_linear(x, norm, 1e-5, ops.bind_linear(*parts), out)
        hold_products(results[0], results[1], rms_norm(x, norm, 1e-5), parts, flips=1)


@pytest.mark.parametrize("weight_format", DENSE + QUANTIZED)
def test_gated_mlp(native: Ops, weight_format: str) -> None:
    shapes = [(160, 64), (160, 64), (64, 160)]
    gate, up, down = (pack(normal(9 + i, n, k) * f32(k**-0.5), weight_format) for i, (n, k) in enumerate(shapes))
    for rows in ROWS:
        x, norm = normal(rows, rows, 64), 1 + 0.1 * normal(10, 64)
        results = [x.copy() for _ in "ab"]
        for ops, out in zip((native, TWIN), results, strict=True):
            ops.gated_mlp(out, norm, 1e-5, ops.bind_linear(gate, up), ops.bind_linear(down))
        h = rms_norm(x, norm, 1e-5)
        inner = silu(h @ unpack(gate).T) * (h @ unpack(up).T)
        hold_products(results[0], results[1], inner, [down], flips=3)
        assert np.abs(results[0] - x).max() > 0.1


def test_silu_of_the_very_large_and_small(native: Ops) -> None:
    """Through an identity: x + silu(g x) * x for gates that overflow exp."""
    eye = np.eye(32, dtype=f32)
    x = np.ones((3, 32), f32)
    x[:, ::2] = -1
    for factor in (0.01, 1, 30, 85, 90, 200):
        results = [x.copy() for _ in "ab"]
        for ops, out in zip((native, TWIN), results, strict=True):
            ops.gated_mlp(
                out,
                np.ones(32, f32),
                0.0,
                ops.bind_linear(pack(eye * factor, "f32"), pack(eye, "f32")),
                ops.bind_linear(pack(eye, "f32")),
            )
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("weight_format", DENSE + QUANTIZED)
def test_embedding_rows_are_exact(native: Ops, weight_format: str) -> None:
    table, ids = pack(normal(11, 37, 96), weight_format), np.array([36, 0, 5, 5, 17], np.int32)
    out = np.empty((5, 96), f32)
    native.embed(native.bind_linear(table), ids, out)
    assert np.array_equal(out, unpack(table)[ids])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_unturned_keys_and_values_are_written_exactly(
    native: Ops, kv_format: str, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    case = scattered_case(kv_format, heads=heads, kv_heads=kv_heads, dim=dim, lengths=[1, 33, 50], block_size=block_size, layers=2)
    for layer in (0, 1):
        arenas = [case.filled(ops, seed=12, layer=layer)[0] for ops in (native, TWIN)]
        assert np.array_equal(arenas[0], arenas[1])


def test_awkward_numbers_are_stored_as_the_twin_stores_them(native: Ops) -> None:
    for kv_format in KV_FORMATS:
        case = scattered_case(kv_format, heads=1, kv_heads=1, dim=64, lengths=[64])
        qkv = np.random.default_rng(13).integers(0, 2**32, (64, 192), dtype=np.uint32).view(f32)
        qkv[~np.isfinite(qkv)] = 1 + 2.0**-8
        qkv[:, :128] = 1 + 3 * 2.0**-8
        arenas = [case.arena() for _ in "ab"]
        for ops, arena in zip((native, TWIN), arenas, strict=True):
            ops.rope_write(ops.bind_batch(case.batch()), case.bind(ops, arena, turned=False), qkv.copy())
        assert np.array_equal(arenas[0], arenas[1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("share", [1, 2])
def test_rotation(native: Ops, heads: int, kv_heads: int, dim: int, norms: bool, share: int) -> None:
    """Whole heads, and only their first half. Norms and rotation round a few times."""
    case = scattered_case("f32", heads=heads, kv_heads=kv_heads, dim=dim, lengths=[21, 5], rotary_dim=dim // share, norms=norms)
    results, arenas = [case.qkv(14) for _ in "ab"], [case.arena() for _ in "ab"]
    for ops, qkv, arena in zip((native, TWIN), results, arenas, strict=True):
        ops.rope_write(ops.bind_batch(case.batch()), case.bind(ops, arena), qkv)
    largest = np.abs(results[1]).max()
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=(8 if norms else 2) * EPS * largest)
    turned = (heads + kv_heads) * dim
    assert np.array_equal(results[0][:, turned:], case.qkv(14)[:, turned:])
    written = ~np.isnan(arenas[1].view(f32))
    assert np.array_equal(written, ~np.isnan(arenas[0].view(f32)))
    np.testing.assert_allclose(arenas[0].view(f32)[written], arenas[1].view(f32)[written], rtol=0, atol=8 * EPS * largest)


def rounding_of_weights(native: Ops, kv_format: str) -> float:
    """By how much, relatively, a weight differs that lies near a tie where weights are rounded to bf16."""
    return 2.0**-8 if native.isa == "avx512bf16" and kv_format == "bf16" else 0.0


def attended(ops: Ops, case: Case, arena: np.ndarray, rows: list[int], qkv: F32) -> F32:
    out = np.full((sum(rows), case.heads * case.dim), np.nan, f32)
    before = arena.copy()
    ops.attend(ops.bind_batch(case.batch(rows)), case.bind(ops, arena), qkv.copy(), out)
    assert np.array_equal(arena, before)
    return out


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("window", [None, 1, 40, PARTITION + 30])
def test_attention_within_its_bound(native: Ops, kv_format: str, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """Decode rows and chunks over scattered blocks, across spans and partitions; a weighted mean errs by its largest value."""
    lengths, rows = [1, 64, 65, 200, PARTITION + 70, 2 * PARTITION + 1], [1, 3, 1, 70, 33, 1]
    case = scattered_case(kv_format, heads=heads, kv_heads=kv_heads, dim=dim, lengths=lengths, window=window)
    arena, _, values = case.filled(TWIN, seed=15)
    qkv = case.qkv(16, sum(rows))
    result, twin = (attended(ops, case, arena, rows, qkv) for ops in (native, twin_of(native.isa)))
    bound = (8 * EPS + rounding_of_weights(native, kv_format)) * max(np.abs(v).max() for v in values)
    np.testing.assert_allclose(result, twin, rtol=0, atol=bound)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_attention_of_one_key_is_its_value(native: Ops, kv_format: str) -> None:
    case = scattered_case(kv_format, heads=4, kv_heads=2, dim=64, lengths=[70], window=1)
    arena, _, values = case.filled(TWIN, seed=17)
    result = attended(native, case, arena, [70], case.qkv(18))
    assert np.array_equal(result.reshape(70, 2, 2, 64), np.repeat(values[0][:, :, None], 2, axis=2))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_large_scores_do_not_overflow(native: Ops, kv_format: str) -> None:
    case = scattered_case(kv_format, heads=4, kv_heads=2, dim=64, lengths=[PARTITION + 90])
    arena, _, values = case.filled(TWIN, seed=19)
    qkv = case.qkv(20, 5) * f32(1000)
    result, twin = (attended(ops, case, arena, [5], qkv) for ops in (native, twin_of(native.isa)))
    assert np.isfinite(result).all()
    # Scores of this size differ by many units in their last place, and exp turns that into a relative difference.
    largest = 1000 * 64**0.5 * 4 * 4
    bound = 64 * EPS * largest + rounding_of_weights(native, kv_format)
    np.testing.assert_allclose(result, twin, rtol=0, atol=bound * np.abs(values[0]).max())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_cache_is_read_as_the_twin_reads_it(native: Ops, kv_format: str) -> None:
    """A query that is zero weighs all keys alike: the mean of the values, whatever the layout of the keys."""
    case = scattered_case(kv_format, heads=3, kv_heads=3, dim=64, lengths=[50])
    arena, _, values = case.filled(native, seed=21)
    result = attended(native, case, arena, [1], np.zeros((1, 9 * 64), f32))
    np.testing.assert_allclose(result.reshape(3, 64), values[0].astype(float).mean(axis=0), atol=1e-6)


def test_builds_have_profiles_of_their_own() -> None:
    profiles = {make_ops(isa).profile for isa in ISAS}
    assert len(profiles) == len(ISAS)
    assert all(make_ops(isa).isa == isa for isa in ISAS)


def test_decode_helper_is_exact() -> None:
    """The bounds above read bf16 through `decode`."""
    assert decode(np.array([0x3F80, 0xC000], np.uint16), "bf16").tolist() == [1.0, -2.0]
