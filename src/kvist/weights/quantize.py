"""Decides the format of each matrix and encodes it: round to nearest in groups of 32, and conversion between dense formats.

It knows canonical names and `PackedLinear`, not files. The rules, for `quantization` "w8a8" or "w4a8": every matrix ends in that
format, with two exceptions: embedding and head are never coarser than w8a8 (they decide the token directly), and a matrix that the
file has in fewer bits stays as it is (more bits would add size and no information). Without `quantization`, quantized matrices stay
and `dtype` converts dense ones. A matrix whose k is no multiple of 32 stays dense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.config import Quantization
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.kernels.ops import F32, GROUP, PackedLinear
from kvist.kernels.packing import dense_to_float32, pack_dense, pack_w4, pack_w8, unpack

BITS = {"w4a8": 4, "w8a8": 8}
ROWS_AT_ONCE = 4096
"""Rows encoded at a time: float32 copies of a large embedding would not fit twice."""


def _divide(groups: F32, scale: F32) -> F32:
    """Groups [n, G, 32] by their scales [n, G], rounded to nearest; 0 where the scale is 0. Values that are not finite
    pass through: they show in the scale, and `require_finite` refuses them there."""
    wide = scale[:, :, None]
    with np.errstate(invalid="ignore"):
        return np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0))


def quantize_w8(values: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Values [n, k] as scale * q, q in -127..127 and scale float32 [n, k / 32]; an all-zero group has scale 0."""
    groups = values.reshape(len(values), -1, GROUP)
    scale = np.abs(groups).max(axis=2) / np.float32(127)
    with np.errstate(invalid="ignore"):
        q = _divide(groups, scale).clip(-127, 127).astype(np.int8)
    return q.reshape(values.shape), scale


def quantize_w4(values: F32) -> tuple[npt.NDArray[np.uint8], F32, F32]:
    """Values [n, k] as scale * q + minimum, q in 0..15; scale and minimum float32 [n, k / 32]; a constant group has scale 0."""
    groups = values.reshape(len(values), -1, GROUP)
    minimum = groups.min(axis=2)
    with np.errstate(invalid="ignore"):
        scale = (groups.max(axis=2) - minimum) / np.float32(15)
        q = _divide(groups - minimum[:, :, None], scale).clip(0, 15).astype(np.uint8)
    return q.reshape(values.shape), scale, minimum


def target_format(name: str, quantization: Quantization) -> str:
    """The format that `quantization` asks of the tensor `name`."""
    return "w8a8" if name in ("embed", "head") else quantization


def encode_dense(matrix: npt.NDArray[Any], format: str, bias: npt.NDArray[Any] | None = None) -> PackedLinear:
    """A dense matrix (float32, float16, or bfloat16 as uint16) [n, k] as `format`; quantized formats need k in whole groups."""
    if format not in BITS:
        return pack_dense(matrix, format, bias)
    pieces = (dense_to_float32(matrix[start : start + ROWS_AT_ONCE]) for start in range(0, len(matrix), ROWS_AT_ONCE))
    if format == "w8a8":
        parts8 = [quantize_w8(piece) for piece in pieces]
        return pack_w8(np.concatenate([part[0] for part in parts8]), np.concatenate([part[1] for part in parts8]), bias)
    parts4 = [quantize_w4(piece) for piece in pieces]
    q, scale, minimum = (np.concatenate([part[i] for part in parts4]) for i in range(3))
    return pack_w4(q, scale, minimum, bias)


def encode(
    name: str,
    matrix: npt.NDArray[Any] | PackedLinear,
    quantization: Quantization | None,
    dtype: str,
    bias: npt.NDArray[Any] | None = None,
) -> PackedLinear:
    """Give the matrix `name` its final format by the rules above. `matrix` is dense [n, k], or packed already (with its bias).

    Raises UnsupportedModelError where float16 cannot hold the values.
    """
    k = matrix.k if isinstance(matrix, PackedLinear) else matrix.shape[1]
    target = target_format(name, quantization) if quantization is not None and k % GROUP == 0 else None
    if isinstance(matrix, PackedLinear) and matrix.format in BITS:
        if target is None or BITS[target] >= BITS[matrix.format]:
            return matrix
        return encode_dense(unpack(matrix), target, matrix.bias)
    assert not isinstance(matrix, PackedLinear), "dense matrices come unpacked"
    if target is not None:
        return encode_dense(matrix, target, bias)
    own = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.uint16): "bf16"}[matrix.dtype]
    packed = encode_dense(matrix, own if dtype == "auto" else dtype, bias)
    if packed.format == "f16" and own != "f16" and np.isinf(packed.data.view(np.float16)).any():
        raise UnsupportedModelError(f"The tensor {name} has values beyond float16's range; use dtype bf16, f32 or auto.")
    return packed


def require_finite(matrix: npt.NDArray[Any] | PackedLinear, name: str, path: Path) -> None:
    """Refuse values that no sound model has: infinities and NaN, in a dense array or in the scales of a packed one."""
    arrays: list[npt.NDArray[Any] | None]
    arrays = [matrix.scale, matrix.minimum, matrix.bias] if isinstance(matrix, PackedLinear) else [matrix]
    for array in arrays:
        if array is None:
            continue
        # Bfloat16 travels as bit patterns: all exponent bits set means not finite.
        bad = ((array & 0x7F80) == 0x7F80).any() if array.dtype == np.uint16 else not np.isfinite(array).all()
        if bad:
            raise ModelFormatError(
                f"{path} holds values that are not finite in the tensor {name}; the file is damaged: fetch it again."
            )
