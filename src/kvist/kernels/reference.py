"""The NumPy twin: the definition of every operation in the `Ops` protocol, slow and plain.

Native kernels agree with it exactly in integer parts and within a stated bound in float parts (they fuse multiply and add). It
knows neither models nor requests. Invariant (law L1): a row's bits are the same alone and among others, for any tiling and any
number of threads. `@` appears once, for integer products, which float32 holds exactly (32 * 128 * 127 < 2**24).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels import reference_sampling
from kvist.kernels.ops import F32, GROUP, I32, AttentionParams, ForwardBatch, Ops, PackedLinear
from kvist.kernels.packing import DENSE_DTYPES, unpack_quants
from kvist.kernels.program import Array, Call, DirectProgram
from kvist.kernels.reference_attention import ReferenceAttention, ReferenceCache, attend, bind_attention, rope_write
from kvist.kernels.reference_math import Activations, decode, quantize_rows, rms_norm, silu
from kvist.kernels.sampling import Adjustment, Drawn, Scores
from kvist.kv.spec import KVSpec

KERNEL_VERSION = 1
TILE_ROWS = 64
TILE_COLUMNS = 512
"""Tiles keep the accumulators in the processor's cache. They do not change a bit."""


@dataclass(frozen=True)
class DenseSegment:
    """weight [k, n] as stored (float32, or 16-bit patterns)."""

    weight: npt.NDArray[Any]
    number_format: str
    bias: F32 | None

    @property
    def n(self) -> int:
        return int(self.weight.shape[1])

    def rows(self, indices: I32) -> F32:
        """Weight rows (output features), dequantized: [len(indices), k]."""
        return np.ascontiguousarray(decode(self.weight[:, indices], self.number_format).T)

    @np.errstate(over="ignore", invalid="ignore")
    def tile(self, x: F32, _: Activations | None, rows: slice, columns: slice) -> F32:
        """One accumulator an output, k ascending, activations as they are."""
        x, weight = x[rows], decode(self.weight[:, columns], self.number_format)
        total = np.zeros((len(x), weight.shape[1]), np.float32)
        product = np.empty_like(total)
        for k in range(len(weight)):
            np.multiply(x[:, k, None], weight[k], out=product)
            total += product
        return total


@dataclass(frozen=True)
class QuantizedSegment:
    """q int8 [G, 32, n]; scale and minimum float32 [G, n]."""

    q: npt.NDArray[np.int8]
    scale: F32
    minimum: F32 | None
    bias: F32 | None

    @property
    def n(self) -> int:
        return int(self.q.shape[2])

    def rows(self, indices: I32) -> F32:
        """Weight rows (output features), dequantized: [len(indices), k]."""
        weight = self.q[:, :, indices].astype(np.float32) * self.scale[:, None, indices]
        if self.minimum is not None:
            weight += self.minimum[:, None, indices]
        return np.ascontiguousarray(weight.reshape(-1, len(indices)).T)

    @np.errstate(over="ignore", invalid="ignore")
    def tile(self, _: F32, activations: Activations | None, rows: slice, columns: slice) -> F32:
        """Groups ascending: an exact integer product, scaled and added; minimums add up on their own and join at the end."""
        assert activations is not None
        shape = (len(activations.q[0, rows]), len(self.scale[0, columns]))
        total, offsets = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        product, scale = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for g in range(len(self.q)):
            np.matmul(activations.q[g, rows], self.q[g, :, columns].astype(np.float32), out=product)
            np.multiply(self.scale[g, columns], activations.scale[g, rows, None], out=scale)
            product *= scale
            total += product
            if self.minimum is not None:
                np.multiply(self.minimum[g, columns], activations.offset[g, rows, None], out=scale)
                offsets += scale
        return total if self.minimum is None else total + offsets


Segment = DenseSegment | QuantizedSegment


@dataclass(frozen=True)
class ReferenceLinear:
    segments: tuple[Segment, ...]
    k: int
    nbytes: int
    """As packed, which is what the other machines read."""
    formats: tuple[str, ...]

    @property
    def n(self) -> int:
        return sum(segment.n for segment in self.segments)

    def starts(self) -> Iterator[tuple[int, Segment]]:
        """Each segment with its first output column."""
        return zip(accumulate((segment.n for segment in self.segments), initial=0), self.segments, strict=False)


def _columns(panels: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """[P, ..., 16] -> [..., n], contiguous."""
    moved = np.moveaxis(panels, 0, -2)
    return np.ascontiguousarray(moved.reshape(*moved.shape[:-2], -1)[..., :n])


def bind_segment(packed: PackedLinear) -> Segment:
    """Undo the panels of `PackedLinear`."""
    if packed.format in DENSE_DTYPES:
        return DenseSegment(_columns(packed.data, packed.n), packed.format, packed.bias)
    q = np.ascontiguousarray(unpack_quants(packed).view(np.int8).T).reshape(-1, GROUP, packed.n)
    scale, minimum = (None if a is None else _columns(a.astype(np.float32), packed.n) for a in (packed.scale, packed.minimum))
    assert scale is not None
    return QuantizedSegment(q, scale, minimum, packed.bias)


def _exp_fingerprint() -> str:
    """NumPy's exp differs between its builds and the processors that it dispatches to, so its bits are part of the profile."""
    return hashlib.sha256(np.exp(np.linspace(-30, 0, 8192, dtype=np.float32)).tobytes()).hexdigest()[:8]


class ReferenceOps:
    """`Ops` in NumPy. Threads share out tiles of the linear layers only; attention runs on the caller's thread. With `bf16_dot` it
    is the twin of the build avx512bf16, else of all others."""

    isa = "numpy"

    def __init__(self, num_threads: int = 1, bf16_dot: bool = False) -> None:
        assert num_threads >= 1
        self.num_threads = num_threads
        self.profile = f"numpy-{KERNEL_VERSION}-{_exp_fingerprint()}{'-bf16dot' if bf16_dot else ''}"
        self._bf16_dot = bf16_dot
        self._pool = ThreadPoolExecutor(num_threads, "kvist-numpy") if num_threads > 1 else None

    def bind_linear(self, *segments: PackedLinear) -> ReferenceLinear:
        assert segments
        assert all(segment.k == segments[0].k for segment in segments)
        formats = tuple(dict.fromkeys(segment.format for segment in segments))
        num_bytes = sum(segment.nbytes for segment in segments)
        return ReferenceLinear(tuple(bind_segment(segment) for segment in segments), segments[0].k, num_bytes, formats)

    def bind_cache(self, arena: npt.NDArray[np.uint8], spec: KVSpec) -> ReferenceCache:
        return ReferenceCache(arena, spec)

    def bind_attention(self, cache: ReferenceCache, layer: int, params: AttentionParams) -> ReferenceAttention:
        return bind_attention(cache, layer, params, self._bf16_dot)

    def bind_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def embed(self, table: ReferenceLinear, token_ids: I32, out: F32) -> None:
        (segment,) = table.segments
        out[...] = segment.rows(token_ids)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: ReferenceLinear, out: F32) -> None:
        self._linear(rms_norm(x, norm, eps), weight, out)

    def linear_add(self, x: F32, weight: ReferenceLinear, residual: F32) -> None:
        product = np.empty_like(residual)
        self._linear(x, weight, product)
        residual += product

    def gated_mlp(self, x: F32, norm: F32, eps: float, gate_up: ReferenceLinear, down: ReferenceLinear) -> None:
        both = np.empty((len(x), gate_up.n), np.float32)
        self.norm_linear(x, norm, eps, gate_up, both)
        gate, up = both[:, : down.k], both[:, down.k :]
        self.linear_add(silu(gate) * up, down, x)

    def rope_write(self, batch: ForwardBatch, attention: ReferenceAttention, qkv: F32) -> None:
        rope_write(batch, attention, qkv)

    def attend(self, batch: ForwardBatch, attention: ReferenceAttention, qkv: F32, out: F32) -> None:
        attend(batch, attention, qkv, out)

    def record(self, calls: Sequence[Call], result: Array) -> DirectProgram:
        return DirectProgram(self, calls, result)

    def bind_sampling(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return rows

    def sample(self, logits: F32, sampling: npt.NDArray[Any], adjustments: Mapping[int, Adjustment]) -> Drawn:
        return reference_sampling.sample(logits, sampling, adjustments)

    def score(self, logits: F32, rows: I32, token_ids: I32, tops: I32) -> Scores:
        return reference_sampling.score(logits, rows, token_ids, tops)

    def _linear(self, x: F32, weight: ReferenceLinear, out: F32) -> None:
        """out = x @ weight.T + bias, tile by tile."""
        quantized = any(isinstance(segment, QuantizedSegment) for segment in weight.segments)
        activations = quantize_rows(x) if quantized else None

        def job(start: int, segment: Segment, rows: slice, columns: slice) -> Callable[[], None]:
            def run() -> None:
                y = segment.tile(x, activations, rows, columns)
                if segment.bias is not None:
                    y += segment.bias[columns]
                out[rows, start + columns.start : start + columns.stop] = y

            return run

        jobs = [
            job(start, segment, slice(row, row + TILE_ROWS), slice(column, min(column + TILE_COLUMNS, segment.n)))
            for start, segment in weight.starts()
            for row in range(0, len(x), TILE_ROWS)
            for column in range(0, segment.n, TILE_COLUMNS)
        ]
        for done in (self._pool.map if self._pool else map)(lambda run: run(), jobs):
            assert done is None


def make_reference_ops(num_threads: int = 1, bf16_dot: bool = False) -> Ops:
    return ReferenceOps(num_threads, bf16_dot)
