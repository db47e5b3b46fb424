"""Attention over scattered blocks, without a model.

case = scattered_case("bf16", heads=6, kv_heads=2, dim=64, lengths=[5, 70], window=20)
arena, keys, values = case.filled(ops, seed=1)       # written through `rope_write`; what the cache now holds, per sequence
case.batch([1, 3])                                   # the last 1 and 3 rows of the two sequences
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvist.kernels.ops import F32, I32, AttentionParams, ForwardBatch, GroupTables, Ops
from kvist.kernels.reference_math import decode, encode
from kvist.kv.spec import KVGroup, KVSpec


@dataclass(frozen=True)
class Case:
    kv_format: str
    heads: int
    kv_heads: int
    dim: int
    lengths: list[int]
    window: int | None
    block_size: int
    layers: int
    rotary_dim: int
    norms: bool
    table: I32
    num_blocks: int

    @property
    def spec(self) -> KVSpec:
        groups = (KVGroup(tuple(range(self.layers)), self.window),)
        return KVSpec(self.kv_heads, self.dim, self.kv_format, self.block_size, groups)

    def params(self, *, turned: bool = True) -> AttentionParams:
        """Not turned: the rotation is the identity."""
        rng = np.random.default_rng(99)
        angles = rng.random((max(self.lengths), self.rotary_dim // 2)) * (6.28 if turned else 0.0)
        norm = [(1 + 0.3 * rng.normal(size=self.dim)).astype(np.float32) for _ in "qk"]
        return AttentionParams(
            self.heads, self.kv_heads, self.dim, self.dim**-0.5, self.window,
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32),
            *(norm if self.norms else (None, None)), norm_eps=1e-6,
        )  # fmt: skip

    def arena(self) -> np.ndarray:
        """Full of NaNs, on a cache line."""
        size = self.num_blocks * self.spec.block_bytes
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        arena = memory[start : start + size].reshape(self.num_blocks, self.spec.block_bytes)
        arena[...] = 0xFF
        return arena

    def bind(self, ops: Ops, arena: np.ndarray, layer: int = 0, *, turned: bool = True) -> Any:
        return ops.bind_attention(ops.bind_cache(arena, self.spec), layer, self.params(turned=turned))

    def batch(self, rows: list[int] | None = None) -> ForwardBatch:
        """The last rows of each sequence; all of them by default."""
        rows = self.lengths if rows is None else rows
        positions = [np.arange(length - count, length) for length, count in zip(self.lengths, rows, strict=True)]
        slots = [
            self.table[s, p // self.block_size].astype(np.int64) * self.block_size + p % self.block_size
            for s, p in enumerate(positions)
        ]
        total = sum(rows)
        return ForwardBatch(
            np.zeros(total, np.int32), np.concatenate(positions).astype(np.int32), np.cumsum([0, *rows]).astype(np.int32),
            np.array(self.lengths, np.int32), (GroupTables(self.table, np.concatenate(slots)),),
        )  # fmt: skip

    def qkv(self, seed: int, rows: int | None = None) -> F32:
        rows = sum(self.lengths) if rows is None else rows
        width = (self.heads + 2 * self.kv_heads) * self.dim
        return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)

    def filled(self, ops: Ops, seed: int, layer: int = 0) -> tuple[np.ndarray, list[F32], list[F32]]:
        """An arena that holds random keys and values (not rotated), and these as the cache's format holds them,
        [length, kv_heads, dim] per sequence."""
        arena, qkv = self.arena(), self.qkv(seed)
        plain = replace(self, norms=False)
        heads = qkv.reshape(len(qkv), -1, self.dim)[:, self.heads :].copy()
        ops.rope_write(ops.bind_batch(self.batch()), plain.bind(ops, arena, layer, turned=False), qkv)
        heads = decode(encode(heads, self.kv_format), self.kv_format)
        parts = np.split(heads, np.cumsum(self.lengths)[:-1])
        return arena, [part[:, : self.kv_heads] for part in parts], [part[:, self.kv_heads :] for part in parts]


def scattered_case(
    kv_format: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[int],
    window: int | None = None,
    block_size: int = 16,
    layers: int = 1,
    rotary_dim: int | None = None,
    norms: bool = False,
) -> Case:
    """Blocks in random order, some of the arena unused, table entries beyond a sequence's end zero."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = iter(np.random.default_rng(sum(lengths)).permutation(num_blocks).tolist())
    table = np.zeros((len(lengths), max(counts)), np.int32)
    for s, count in enumerate(counts):
        table[s, :count] = [next(order) for _ in range(count)]
    return Case(kv_format, heads, kv_heads, dim, lengths, window, block_size, layers, rotary_dim or dim, norms, table, num_blocks)
