"""Between plain matrices and the kernels' layouts of `ops.PackedLinear`: packing, unpacking and 16-bit conversion.

It rearranges and knows no file format, no quantization method (that is `weights/quantize.py`) and no arithmetic of a forward pass.
Invariants:

* packing is exact: `unpack(pack_*(...))` gives back scale * q (+ minimum), computed in float32, element for element;
* rows beyond n, up to the next multiple of `PANEL`, decode to zero: dense zeros, w8a8 128 (zero) with scale 0, w4a8 all zeros;
* k is a multiple of `GROUP` in the quantized formats; the results are C-contiguous and own their memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, GROUP, PANEL, PackedLinear

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

QUADS = GROUP // 4
DENSE_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}
QUANTIZED_FORMATS = ("w8a8", "w4a8")
FORMATS = (*DENSE_DTYPES, *QUANTIZED_FORMATS)


def to_bf16(values: F32) -> U16:
    """Float32 to bfloat16 bit patterns, rounded to nearest, ties to even; NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: U16) -> F32:
    """Bfloat16 bit patterns to float32, exactly."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def dense_to_float32(matrix: npt.NDArray[Any]) -> F32:
    """Float32, float16, or bfloat16 as uint16 bit patterns, to float32, exactly."""
    if matrix.dtype == np.uint16:
        return from_bf16(matrix)
    assert matrix.dtype in (np.float32, np.float16), matrix.dtype
    return matrix.astype(np.float32, copy=False)


def data_shape(format: str, n: int, k: int) -> tuple[int, ...]:
    """The shape of `PackedLinear.data` for a matrix [n, k]."""
    panels = -(-n // PANEL)
    if format in DENSE_DTYPES:
        return (panels, k, PANEL)
    assert format in QUANTIZED_FORMATS, format
    assert k % GROUP == 0, k
    return (panels, k // GROUP, QUADS if format == "w8a8" else QUADS // 2, PANEL, 4)


def _pad_rows(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Zero rows up to a multiple of PANEL."""
    missing = -len(matrix) % PANEL
    return np.pad(matrix, [(0, missing), (0, 0)]) if missing else matrix


def _pack_columns(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[n, m] to panels [P, m, 16]."""
    padded = _pad_rows(matrix)
    return np.ascontiguousarray(padded.reshape(-1, PANEL, padded.shape[1]).transpose(0, 2, 1))


def _unpack_columns(panels: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Panels [P, m, 16] to [n, m]."""
    return panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:n]


def _bias(bias: npt.NDArray[Any] | None, n: int) -> F32 | None:
    if bias is None:
        return None
    assert bias.shape == (n,), (bias.shape, n)
    return np.ascontiguousarray(bias, dtype=np.float32)


def pack_dense(w: npt.NDArray[Any], format: str, bias: npt.NDArray[Any] | None = None) -> PackedLinear:
    """A dense matrix [n, k] (float32, float16, or bfloat16 as uint16) in format "f32", "f16" or "bf16".

    A format of less precision rounds to nearest even; values beyond float16's range become infinities.
    """
    n, k = w.shape
    if format == "f32":
        values: npt.NDArray[Any] = dense_to_float32(w)
    elif format == "bf16":
        values = w if w.dtype == np.uint16 else to_bf16(dense_to_float32(w))
    else:
        assert format == "f16", format
        with np.errstate(over="ignore"):
            values = (w if w.dtype == np.float16 else dense_to_float32(w).astype(np.float16)).view(np.uint16)
    return PackedLinear(format, n, k, _pack_columns(values), bias=_bias(bias, n))


def _check_groups(k: int, n: int, *tables: npt.NDArray[Any]) -> None:
    assert k % GROUP == 0, f"k = {k} is no multiple of {GROUP}"
    for table in tables:
        assert table.dtype in (np.float16, np.float32), table.dtype
        assert table.shape == (n, k // GROUP), (table.shape, n, k)


def pack_w8(q: npt.NDArray[np.int8], scale: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None) -> PackedLinear:
    """Weights scale * q as `w8a8`: q int8 [n, k], scale float16 or float32 [n, k / 32]."""
    n, k = q.shape
    assert q.dtype == np.int8, q.dtype
    _check_groups(k, n, scale)
    stored = _pad_rows(q).view(np.uint8).reshape(-1, PANEL, k // GROUP, QUADS, 4).transpose(0, 2, 3, 1, 4)
    # Flipping the top bit of a two's complement byte adds 128.
    data = np.bitwise_xor(stored, np.uint8(0x80), order="C")
    return PackedLinear("w8a8", n, k, data, _pack_columns(scale), bias=_bias(bias, n))


def pack_w4(q: U8, scale: npt.NDArray[Any], minimum: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None) -> PackedLinear:
    """Weights scale * q + minimum as `w4a8`: q uint8 in 0..15 [n, k], scale and minimum float16 or float32 [n, k / 32]."""
    n, k = q.shape
    assert q.dtype == np.uint8, q.dtype
    assert scale.dtype == minimum.dtype, (scale.dtype, minimum.dtype)
    _check_groups(k, n, scale, minimum)
    quads = _pad_rows(q).reshape(-1, PANEL, k // GROUP, 2, QUADS // 2, 4)
    both = quads[:, :, :, 0] | (quads[:, :, :, 1] << np.uint8(4))
    data = np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4))
    return PackedLinear("w4a8", n, k, data, _pack_columns(scale), _pack_columns(minimum), _bias(bias, n))


def unpack_quants(packed: PackedLinear) -> npt.NDArray[Any]:
    """The integers of a quantized matrix, [n, k]: int8 for w8a8, uint8 in 0..15 for w4a8."""
    quads = packed.data.transpose(0, 3, 1, 2, 4)
    if packed.format == "w8a8":
        rows: npt.NDArray[np.uint8] = np.bitwise_xor(quads, np.uint8(0x80)).reshape(-1, packed.k)
        return rows[: packed.n].view(np.int8)
    assert packed.format == "w4a8", packed.format
    both: npt.NDArray[np.uint8] = np.stack([quads & np.uint8(15), quads >> np.uint8(4)], axis=3)
    return both.reshape(-1, packed.k)[: packed.n]


def unpack(packed: PackedLinear) -> F32:
    """The float32 matrix [n, k] that `packed` stands for: scale * q (+ minimum) computed in float32, dense formats exactly."""
    if packed.format in DENSE_DTYPES:
        rows = _unpack_columns(packed.data, packed.n)
        if packed.format == "f16":
            return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
        return from_bf16(rows) if packed.format == "bf16" else np.array(rows, dtype=np.float32, order="C")
    assert packed.scale is not None
    q = unpack_quants(packed).reshape(packed.n, -1, GROUP).astype(np.float32)
    values: F32 = _unpack_columns(packed.scale, packed.n).astype(np.float32)[:, :, None] * q
    if packed.minimum is not None:
        values += _unpack_columns(packed.minimum, packed.n).astype(np.float32)[:, :, None]
    return values.reshape(packed.n, packed.k)
