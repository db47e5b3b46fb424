"""The small arithmetic of the NumPy twin: lane sums, norms, activations and number formats, each in one fixed order.

Knows nothing of weights, caches or batches. Invariant: an element of a result depends on its own row alone, and on nothing that
the number of rows could change; so sums run over explicit lanes or loops (NumPy's own `sum` and `@` choose an order by shape).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, GROUP
from kvist.kernels.packing import from_bf16, to_bf16

LANES = 16
TINY = np.float32(1e-30)
"""Groups of activations that are smaller than this quantize to zero: 127 / amax would overflow."""


def lane_sum(values: F32) -> F32:
    """Sum over the last axis: lane j of 16 adds elements j, j + 16, ..., then lanes fold as 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    size = values.shape[-1]
    if size % LANES:
        padded = np.zeros((*values.shape[:-1], -(-size // LANES) * LANES), np.float32)
        padded[..., :size] = values
        values, size = padded, padded.shape[-1]
    lanes = values[..., :LANES].copy()
    for start in range(LANES, size, LANES):
        lanes += values[..., start : start + LANES]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


@np.errstate(over="ignore", invalid="ignore")
def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019)."""
    mean = lane_sum(x * x) / np.float32(x.shape[-1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    result: F32 = x * inverse[..., None] * weight
    return result


@np.errstate(over="ignore")
def silu(x: F32) -> F32:
    exponential: F32 = np.exp(-x)
    return x / (np.float32(1) + exponential)


@dataclass(frozen=True)
class Activations:
    """Rows in groups of 32 as integers in -127..127 (kept in float32, where they are exact).

    q [G, T, 32]; scale [G, T] = amax / 127; offset [G, T] = scale * (sum of q), which is what a weight's minimum multiplies.
    """

    q: F32
    scale: F32
    offset: F32


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def quantize_rows(x: F32) -> Activations:
    """x [T, k], k a multiple of 32. Rounds half to even."""
    grouped = x.reshape(len(x), x.shape[1] // GROUP, GROUP).transpose(1, 0, 2)
    amax = np.abs(grouped).max(axis=-1)
    inverse = np.where(amax < TINY, np.float32(0), np.float32(127) / amax)
    q = np.ascontiguousarray(np.rint(grouped * inverse[..., None]))
    scale = amax * np.float32(1 / 127)
    return Activations(q, scale, scale * q.sum(axis=-1))


def encode(x: F32, number_format: str) -> npt.NDArray[Any]:
    """float32 -> what is stored: float32, float16 or bf16 bit patterns."""
    if number_format == "bf16":
        return to_bf16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if number_format == "f16" else np.float32)


def decode(stored: npt.NDArray[Any], number_format: str) -> F32:
    """Inverse of `encode`, exact. 16-bit values may come as uint16 bit patterns."""
    if number_format == "bf16":
        return from_bf16(stored)
    if number_format == "f16" and stored.dtype != np.float16:
        stored = stored.view(np.float16)
    return stored.astype(np.float32)
