"""The twin's linear half against its definition spelled out with scalars, bit for bit; and its freedom from tiles and threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.machines import make_ops
from helpers.single import pack
from kvist.kernels.ops import F32, PackedLinear
from kvist.kernels.packing import pack_dense, pack_w4, pack_w8, unpack
from kvist.kernels.reference import TILE_COLUMNS, TILE_ROWS, make_reference_ops
from kvist.kernels.reference_math import decode, encode, lane_sum, quantize_rows, rms_norm, silu

FORMATS = ("f32", "f16", "bf16", "w8a8", "w4a8")
f32 = np.float32


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).normal(size=shape).astype(f32)


def product(x: F32, weight: PackedLinear, threads: int = 1) -> F32:
    """x @ weight.T + bias, by the twin."""
    ops = make_reference_ops(threads)
    out = np.zeros((len(x), weight.n), f32)
    ops.linear_add(x, ops.bind_linear(weight), out)
    return out


def scalar_lane_sum(values: list[f32]) -> f32:
    lanes = [f32(0)] * 16
    for i, value in enumerate(values):
        lanes[i % 16] = lanes[i % 16] + value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    return lanes[0]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
def test_a_lane_sum_has_one_order(size: int) -> None:
    values = normal(size, 5, size)
    assert lane_sum(values).tolist() == [scalar_lane_sum(list(row)) for row in values]


def test_rms_norm() -> None:
    x, weight = normal(1, 3, 40), normal(2, 40)
    for row, result in zip(x, rms_norm(x, weight, 1e-5), strict=True):
        scale = f32(1) / np.sqrt(scalar_lane_sum([v * v for v in row]) / f32(40) + f32(1e-5))
        assert result.tolist() == [v * scale * w for v, w in zip(row, weight, strict=True)]


def test_silu() -> None:
    x = np.array([-np.inf, -200, -1, 0, 1, 200], f32)
    with np.errstate(invalid="ignore"):
        result = silu(x)
    assert result[1:].tolist() == [-0.0, f32(-1) / (f32(1) + np.exp(f32(1))), 0, f32(1) / (f32(1) + np.exp(f32(-1))), 200]


def test_activations_round_half_to_even_within_their_group() -> None:
    x = np.zeros((1, 64), f32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    x[0, 32:34] = [-2, 1]
    result = quantize_rows(x)
    assert result.q[0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert result.q[1, 0, :2].tolist() == [-127, 64]
    assert result.scale[:, 0].tolist() == [1, f32(2) * f32(1 / 127)]
    assert result.offset[:, 0].tolist() == [129, f32(2) * f32(1 / 127) * f32(-63)]


def test_activations_of_nothing_are_nothing() -> None:
    for smallest in (0.0, 1e-44, 1e-37):
        result = quantize_rows(np.full((1, 32), smallest, f32))
        assert not result.q.any()
        assert not result.offset.any()


def scalar_quantized(x: F32, q: np.ndarray, scale: F32, minimum: F32 | None) -> list[list[f32]]:
    """Rows of x against columns of q [n, k] by the letter: groups ascending, one accumulator each for products and minimums."""
    result = []
    for row in x.reshape(len(x), -1, 32):
        result.append([f32(0)] * len(q))
        for column in range(len(q)):
            total = offset = f32(0)
            for g, group in enumerate(row):
                amax = np.abs(group).max()
                integers = [int(np.rint(v * (f32(127) / amax))) for v in group]
                step = amax * f32(1 / 127)
                dot = sum(int(a) * int(b) for a, b in zip(integers, q[column, 32 * g : 32 * g + 32], strict=True))
                total = total + f32(dot) * (scale[column, g] * step)
                if minimum is not None:
                    offset = offset + minimum[column, g] * (step * f32(sum(integers)))
            result[-1][column] = total if minimum is None else total + offset
    return result


def test_w8a8_by_the_letter() -> None:
    rng = np.random.default_rng(3)
    q, scale = rng.integers(-128, 128, (19, 96)).astype(np.int8), rng.random((19, 3)).astype(np.float16)
    x = normal(4, 3, 96)
    assert product(x, pack_w8(q, scale)).tolist() == scalar_quantized(x, q, scale.astype(f32), None)


def test_w4a8_by_the_letter() -> None:
    rng = np.random.default_rng(5)
    q = rng.integers(0, 16, (19, 96)).astype(np.uint8)
    scale, minimum = rng.random((19, 3)).astype(f32), -rng.random((19, 3)).astype(f32)
    x = normal(6, 3, 96)
    assert product(x, pack_w4(q, scale, minimum)).tolist() == scalar_quantized(x, q, scale, minimum)


@pytest.mark.parametrize("weight_format", ["f32", "f16", "bf16"])
def test_dense_by_the_letter(weight_format: str) -> None:
    x, weight = normal(7, 3, 21), pack_dense(normal(8, 18, 21), weight_format)
    plain = unpack(weight)
    result = product(x, weight)
    for t in range(3):
        for column in range(18):
            total = f32(0)
            for k in range(21):
                total = total + x[t, k] * plain[column, k]
            assert result[t, column] == total


def test_a_bias_comes_last() -> None:
    bias = normal(9, 20)
    x, w = normal(10, 4, 64), normal(11, 20, 64)
    for weight_format in FORMATS:
        assert np.array_equal(product(x, pack(w, weight_format, bias)), product(x, pack(w, weight_format)) + bias)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_neither_tiles_nor_company_nor_threads_change_a_row(weight_format: str) -> None:
    n, rows = TILE_COLUMNS + 37, 2 * TILE_ROWS + 9
    x, weight = normal(12, rows, 64), pack(normal(13, n, 64), weight_format)
    whole = product(x, weight)
    assert np.array_equal(product(x, weight, threads=3), whole)
    for some in (slice(0, 1), slice(70, 71), slice(3, 5), slice(60, 77), slice(0, TILE_ROWS + 1)):
        assert np.array_equal(product(x[some], weight), whole[some])
    # A column's bits are its own as well: the first 16 columns alone.
    assert np.array_equal(product(x, pack(normal(13, n, 64)[:16], weight_format)), whole[:, :16])


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_exp_of_an_element_is_its_own(size: int, seed: int) -> None:
    """The twin is exact only as long as NumPy's exp does not depend on where in an array an element lies."""
    x = (-30 * np.random.default_rng(seed).random(size)).astype(f32)
    whole = np.exp(x)
    assert [np.exp(x[i : i + 1])[0] for i in range(size)] == whole.tolist()
    assert np.array_equal(np.exp(np.ascontiguousarray(x[::-1]))[::-1], whole)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_embedding_rows_are_dequantized_exactly(weight_format: str) -> None:
    table = pack(normal(14, 50, 64), weight_format)
    ops, ids = make_reference_ops(), np.array([49, 0, 7, 7], np.int32)
    out = np.empty((4, 64), f32)
    ops.embed(ops.bind_linear(table), ids, out)
    assert np.array_equal(out, unpack(table)[ids])


def test_segments_stand_side_by_side_and_may_differ_in_format() -> None:
    x, norm = normal(15, 5, 64), normal(16, 64)
    parts = [
        pack(normal(17 + i, n, 64), weight_format)
        for i, (n, weight_format) in enumerate(zip((20, 7, 33), FORMATS[2:], strict=True))
    ]
    ops = make_reference_ops()
    linear = ops.bind_linear(*parts)
    assert (linear.n, linear.k) == (60, 64)
    out = np.empty((5, 60), f32)
    ops.norm_linear(x, norm, 1e-6, linear, out)
    assert np.array_equal(out, np.hstack([product(rms_norm(x, norm, 1e-6), part) for part in parts]))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_gated_mlp_is_its_parts(weight_format: str) -> None:
    x, norm = normal(20, 5, 64), normal(21, 64)
    gate, up, down = (pack(normal(22 + i, n, k), weight_format) for i, (n, k) in enumerate([(96, 64), (96, 64), (64, 96)]))
    ops, out = make_reference_ops(), x.copy()
    ops.gated_mlp(out, norm, 1e-6, ops.bind_linear(gate, up), ops.bind_linear(down))
    h = rms_norm(x, norm, 1e-6)
    assert np.array_equal(out, x + product(silu(product(h, gate)) * product(h, up), down))


def test_no_rows_are_fine() -> None:
    for weight_format in FORMATS:
        assert product(np.empty((0, 64), f32), pack(normal(25, 20, 64), weight_format)).shape == (0, 20)


def test_stored_numbers_round_to_nearest_even() -> None:
    bits = np.random.default_rng(26).integers(0, 2**32, 20000, dtype=np.uint32)
    x = np.concatenate([bits.view(f32), np.array([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 65520], f32)])
    x = x[~np.isnan(x)]
    assert np.array_equal(decode(encode(x, "bf16"), "bf16"), x.astype(ml_dtypes.bfloat16).astype(f32))
    with np.errstate(over="ignore"):
        assert np.array_equal(decode(encode(x, "f16"), "f16"), x.astype(np.float16).astype(f32))
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(f32)
    for number_format in ("bf16", "f16", "f32"):
        assert np.isnan(decode(encode(nans, number_format), number_format)).all()


def test_the_profile_is_stable_and_names_the_twin() -> None:
    ops = make_ops("numpy", 2)
    assert (ops.isa, ops.num_threads) == ("numpy", 2)
    assert ops.profile == make_reference_ops().profile
    assert ops.profile.startswith("numpy-1-")
