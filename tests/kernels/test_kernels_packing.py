"""Packing is exact, and bytes lie where `ops.PackedLinear` says they do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.kernels.packing import data_shape, from_bf16, pack_dense, pack_w4, pack_w8, to_bf16, unpack, unpack_quants


def _quants(n: int, k: int, low: int, high: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, size=(n, k))


def _scales(n: int, k: int, dtype: type, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k // 32)).astype(dtype)


def test_w8_bytes_lie_in_quads_of_columns() -> None:
    q = _quants(21, 96, -128, 128).astype(np.int8)
    packed = pack_w8(q, _scales(21, 96, np.float16))
    assert packed.data.shape == (2, 3, 8, 16, 4) == data_shape("w8a8", 21, 96)
    assert packed.data.dtype == np.uint8
    for row, col in [(0, 0), (5, 33), (15, 95), (16, 31), (20, 64)]:
        element = col % 32
        assert packed.data[row // 16, col // 32, element // 4, row % 16, element % 4] == int(q[row, col]) + 128


def test_w4_nibbles_hold_quad_i_and_quad_i_plus_4() -> None:
    q = _quants(21, 96, 0, 16).astype(np.uint8)
    packed = pack_w4(q, _scales(21, 96, np.float32), _scales(21, 96, np.float32, 2))
    assert packed.data.shape == (2, 3, 4, 16, 4) == data_shape("w4a8", 21, 96)
    for row, col in [(0, 0), (5, 33), (15, 95), (16, 31), (20, 64), (3, 16), (3, 15)]:
        quad, element = col % 32 // 4, col % 4
        byte = int(packed.data[row // 16, col // 32, quad % 4, row % 16, element])
        assert (byte >> 4 if quad >= 4 else byte & 15) == q[row, col]


def test_padding_rows_are_neutral() -> None:
    w8 = pack_w8(_quants(17, 32, -128, 128).astype(np.int8), np.ones((17, 1), np.float32))
    assert (w8.data[1, :, :, 1:, :] == 128).all()
    assert w8.scale is not None
    assert (w8.scale[1, :, 1:] == 0).all()
    w4 = pack_w4(_quants(17, 32, 0, 16).astype(np.uint8), np.ones((17, 1), np.float32), np.ones((17, 1), np.float32))
    assert w4.scale is not None
    assert w4.minimum is not None
    assert not w4.data[1, :, :, 1:, :].any()
    assert not w4.scale[1, :, 1:].any()
    assert not w4.minimum[1, :, 1:].any()
    dense = pack_dense(np.ones((17, 5), np.float32), "f32")
    assert dense.data.shape == (2, 5, 16)
    assert not dense.data[1, :, 1:].any()


def test_dense_panels_hold_columns_side_by_side() -> None:
    w = np.random.default_rng(0).normal(size=(20, 7)).astype(np.float32)
    packed = pack_dense(w, "f32", bias=np.arange(20))
    assert packed.data[1, 6, 3] == w[19, 6]
    assert packed.bias is not None
    assert packed.bias.dtype == np.float32
    assert packed.bias.tolist() == list(range(20))
    assert all(array.flags["C_CONTIGUOUS"] for array in (packed.data, packed.bias))


@given(n=st.integers(1, 50), groups=st.integers(1, 4), seed=st.integers(0, 99), half=st.booleans())
def test_quantized_round_trip(n: int, groups: int, seed: int, half: bool) -> None:
    k, dtype = groups * 32, np.float16 if half else np.float32
    scale, minimum = _scales(n, k, dtype, seed), _scales(n, k, dtype, seed + 1)
    wide = np.repeat(scale.astype(np.float32), 32, axis=1), np.repeat(minimum.astype(np.float32), 32, axis=1)
    q8 = _quants(n, k, -128, 128, seed).astype(np.int8)
    packed = pack_w8(q8, scale)
    assert unpack_quants(packed).tobytes() == q8.tobytes()
    assert unpack(packed).tobytes() == (wide[0] * q8.astype(np.float32)).tobytes()
    q4 = _quants(n, k, 0, 16, seed).astype(np.uint8)
    packed = pack_w4(q4, scale, minimum)
    assert unpack_quants(packed).tobytes() == q4.tobytes()
    assert unpack(packed).tobytes() == (wide[0] * q4.astype(np.float32) + wide[1]).tobytes()
    assert packed.data.flags["C_CONTIGUOUS"]
    assert packed.scale is not None
    assert packed.scale.flags["C_CONTIGUOUS"]


@given(n=st.integers(1, 40), k=st.integers(1, 40), seed=st.integers(0, 99))
def test_dense_round_trip(n: int, k: int, seed: int) -> None:
    w = np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)
    assert unpack(pack_dense(w, "f32")).tobytes() == w.tobytes()
    half = w.astype(np.float16)
    assert unpack(pack_dense(half, "f16")).tobytes() == half.astype(np.float32).tobytes()
    brain = w.astype(ml_dtypes.bfloat16)
    assert unpack(pack_dense(brain.view(np.uint16), "bf16")).tobytes() == brain.astype(np.float32).tobytes()
    assert unpack(pack_dense(w, "bf16")).tobytes() == brain.astype(np.float32).tobytes()
    assert unpack(pack_dense(brain.view(np.uint16), "f32")).tobytes() == brain.astype(np.float32).tobytes()


def test_bf16_rounds_ties_to_even_and_keeps_specials() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800001, 0x80000000], np.uint32)
    got = to_bf16(bits.view(np.float32))
    assert [hex(v) for v in got] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7f80", "0xffc0", "0x8000"]
    assert from_bf16(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]


def test_quantized_k_must_be_whole_groups() -> None:
    with pytest.raises(AssertionError):
        pack_w8(np.zeros((4, 40), np.int8), np.zeros((4, 1), np.float32))
