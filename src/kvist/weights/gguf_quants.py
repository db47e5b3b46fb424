"""Blocks of GGUF tensor types to packed matrices: exactly where a kernel format can say the same, else re-encoded to w8a8.

It knows block layouts, not files or models. What becomes of each type:

* F32, F16, BF16: dense, exact;
* Q4_0, Q4_1 (float16 scale and minimum) and Q4_K (float32, as products of two levels): w4a8, exact;
* Q8_0: w8a8, exact;
* every other type that the gguf library decodes: decoded by it, then w8a8 in groups of 32 with float32 scales;
* a quantized tensor whose k is no multiple of 32: dense float32.

Exact means that `packing.unpack` equals `gguf.quants.dequantize` in every value (zeros may differ in sign).
Source of the layouts: ggml's block structures, as the gguf library documents them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, GROUP, PackedLinear
from kvist.kernels.packing import pack_w4, pack_w8
from kvist.weights.quantize import ROWS_AT_ONCE, encode_dense

U8 = npt.NDArray[np.uint8]
_DENSE: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class UndecodableTypeError(Exception):
    """The gguf library does not decode this type."""


def decode_matrix(type_name: str, rows: U8, k: int, bias: F32 | None) -> PackedLinear | npt.NDArray[Any]:
    """Raw rows [n, bytes] of a tensor of type `type_name` with k columns: a packed matrix with its bias inside, or a dense array
    [n, k] (float32, float16, or bfloat16 as uint16) without it. Raises UndecodableTypeError."""
    if type_name in _DENSE:
        return np.ascontiguousarray(rows).view(_DENSE[type_name])
    if k % GROUP:
        return np.concatenate([_dequantize(type_name, piece) for piece in _pieces(rows)])
    if type_name in _EXACT:
        parts = [_EXACT[type_name](piece) for piece in _pieces(rows)]
        q, *tables = (np.concatenate([part[i] for part in parts]) for i in range(len(parts[0])))
        return pack_w8(q, tables[0], bias) if type_name == "Q8_0" else pack_w4(q, *_same_dtype(*tables), bias)
    return encode_dense(np.concatenate([_dequantize(type_name, piece) for piece in _pieces(rows)]), "w8a8", bias)


def decode_vector(type_name: str, rows: U8) -> F32:
    """A one-dimensional tensor as float32. Raises UndecodableTypeError."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    if type_name == "F32":
        return flat.view("<f4").astype(np.float32)
    return _dequantize(type_name, flat).reshape(-1).astype(np.float32)


def _pieces(rows: U8) -> list[U8]:
    return [rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE)]


def _dequantize(type_name: str, rows: U8) -> F32:
    import gguf

    try:
        values: F32 = gguf.quants.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[type_name])
    except NotImplementedError:
        raise UndecodableTypeError(type_name) from None
    return values


def _same_dtype(scale: npt.NDArray[Any], minimum: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if scale.dtype == minimum.dtype:
        return scale, minimum
    return scale.astype(np.float32), minimum.astype(np.float32)


def _nibbles(blocks: U8) -> U8:
    """Bytes [..., m] to quants [..., 2 m]: all low nibbles, then all high ones."""
    return np.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)


def _q8_0(rows: U8) -> tuple[npt.NDArray[Any], ...]:
    blocks = rows.reshape(len(rows), -1, 34)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return blocks[:, :, 2:].reshape(len(rows), -1).view(np.int8), scale


def _q4_0(rows: U8) -> tuple[npt.NDArray[Any], ...]:
    blocks = rows.reshape(len(rows), -1, 18)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    exact = scale.astype(np.float32) * np.float32(-8)
    # Eight times a large scale is beyond float16; then both tables are float32.
    fits = bool((np.abs(exact) <= np.finfo(np.float16).max).all())
    return _nibbles(blocks[:, :, 2:]).reshape(len(rows), -1), scale, exact.astype(np.float16) if fits else exact


def _q4_1(rows: U8) -> tuple[npt.NDArray[Any], ...]:
    blocks = rows.reshape(len(rows), -1, 20)
    both = np.ascontiguousarray(blocks[:, :, :4]).view("<f2")
    return _nibbles(blocks[:, :, 4:]).reshape(len(rows), -1), both[:, :, 0], both[:, :, 1]


def _q4_k(rows: U8) -> tuple[npt.NDArray[Any], ...]:
    """256 elements: d and dmin (float16), eight 6-bit scales and minima in 12 bytes, then 128 bytes of nibbles, 32 bytes for each
    two groups. weight = (d * scale) * q - (dmin * minimum)."""
    blocks = rows.reshape(len(rows), -1, 144)
    level = np.ascontiguousarray(blocks[:, :, :4]).view("<f2").astype(np.float32)
    low, mid, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    top = np.uint8(0x30)
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & top)], axis=2).astype(np.float32)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & top)], axis=2).astype(np.float32)
    q = _nibbles(blocks[:, :, 16:].reshape(len(rows), -1, 4, 32)).reshape(len(rows), -1)
    scale = (level[:, :, :1] * scales).reshape(len(rows), -1)
    return q, scale, -(level[:, :, 1:] * minima).reshape(len(rows), -1)


_EXACT: dict[str, Callable[[U8], tuple[npt.NDArray[Any], ...]]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
