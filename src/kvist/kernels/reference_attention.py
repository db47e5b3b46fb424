"""The NumPy twin of the KV cache: its layout, rotary embedding, writes, and attention with an online softmax.

Attention per row and head (FlashAttention, Dao 2022, with fixed boundaries): keys are walked in spans of `SPAN`, inside partitions
of `PARTITION` positions, both aligned to absolute positions, and partitions are merged in ascending order. So a row's bits
depend on its own position and visible keys alone. Knows nothing of requests or of how blocks were chosen.

With `bf16_dot`, bf16 caches are attended as 16-bit dot instructions do it: queries and weights are rounded to bf16 too (weights
before they are summed), and of each pair of neighbours, elements of a key or keys, the second one's product is added first. A
product of two bf16 is exact in float32, so product and sum here are one rounding, as in the instruction (Intel SDM, VDPBF16PS).

Layout of a layer's part of a block, K then V, head-major; 16-bit formats for dot instructions pair up neighbours:

| format | K | V |
|---|---|---|
| f32, f16 | [kv_heads, block_size / 16, head_dim, 16 keys] | [kv_heads, block_size, head_dim] |
| bf16 | [kv_heads, block_size / 16, head_dim / 2, 16 keys, 2] | [kv_heads, block_size / 2, head_dim, 2 keys] |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, I32, KEY_TILE, PARTITION, SPAN, AttentionParams, ForwardBatch
from kvist.kernels.reference_math import decode, encode, lane_sum, rms_norm
from kvist.kv.spec import KVSpec

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
TILE_ROWS = 64
"""Rows that are attended at once. They do not change a bit."""


@dataclass(frozen=True)
class ReferenceCache:
    arena: npt.NDArray[np.uint8]
    spec: KVSpec


@dataclass(frozen=True)
class ReferenceAttention:
    """`keys` and `values` are views of the arena, [num_blocks, ...layout of one layer's part]."""

    params: AttentionParams
    kv_format: str
    block_size: int
    group: int
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    dots: bool = False
    """Whether the arithmetic is that of 16-bit dot products."""

    @property
    def token_bytes(self) -> int:
        return int(self.keys[0].nbytes + self.values[0].nbytes) // self.block_size

    def write(self, slots: npt.NDArray[np.int64], key: F32, value: F32) -> None:
        """key and value [T, kv_heads, head_dim] go to their slots."""
        block, offset = slots // self.block_size, slots % self.block_size
        tile, lane = offset // KEY_TILE, offset % KEY_TILE
        key, value = encode(key, self.kv_format), encode(value, self.kv_format)
        if self.kv_format == "bf16":
            self.keys[block, :, tile, :, lane, :] = key.reshape(*key.shape[:2], -1, 2)
            self.values[block, :, offset // 2, :, offset % 2] = value
        else:
            self.keys[block, :, tile, :, lane] = key
            self.values[block, :, offset, :] = value

    def read(self, block_table: I32, start: int, stop: int) -> tuple[F32, F32]:
        """Keys [kv_heads, head_dim, n] and values [n, kv_heads, head_dim] of positions start .. stop - 1."""
        positions = np.arange(start, stop)
        block, offset = block_table[positions // self.block_size], positions % self.block_size
        tile, lane = offset // KEY_TILE, offset % KEY_TILE
        if self.kv_format == "bf16":
            keys = self.keys[block, :, tile, :, lane, :].reshape(len(positions), -1, self.params.head_dim)
            values = self.values[block, :, offset // 2, :, offset % 2]
        else:
            keys, values = self.keys[block, :, tile, :, lane], self.values[block, :, offset, :]
        return np.ascontiguousarray(decode(keys, self.kv_format).transpose(1, 2, 0)), decode(values, self.kv_format)


def bind_attention(cache: ReferenceCache, layer: int, params: AttentionParams, bf16_dot: bool = False) -> ReferenceAttention:
    spec, arena = cache.spec, cache.arena
    assert spec.block_size % KEY_TILE == 0
    assert params.head_dim % 2 == 0
    assert (spec.num_kv_heads, spec.head_dim) == (params.num_kv_heads, params.head_dim)
    group = next(index for index, group in enumerate(spec.groups) if layer in group.layers)
    assert spec.groups[group].window == params.window
    flat = arena.view(STORED[spec.kv_format])
    part = spec.block_size * spec.num_kv_heads * spec.head_dim
    start = spec.groups[group].layers.index(layer) * 2 * part
    blocks, heads, size, dim = len(arena), spec.num_kv_heads, spec.block_size, spec.head_dim
    keys, values = flat[:, start : start + part], flat[:, start + part : start + 2 * part]
    if spec.kv_format == "bf16":
        keys = keys.reshape(blocks, heads, size // KEY_TILE, dim // 2, KEY_TILE, 2)
        values = values.reshape(blocks, heads, size // 2, dim, 2)
    else:
        keys = keys.reshape(blocks, heads, size // KEY_TILE, dim, KEY_TILE)
        values = values.reshape(blocks, heads, size, dim)
    assert np.may_share_memory(keys, arena)
    assert np.may_share_memory(values, arena)
    return ReferenceAttention(params, spec.kv_format, size, group, keys, values, bf16_dot and spec.kv_format == "bf16")


def _heads(qkv: F32, params: AttentionParams) -> tuple[F32, F32, F32]:
    """Views of qkv: q, k and v as [T, heads, head_dim]."""
    heads = qkv.reshape(len(qkv), -1, params.head_dim)
    first, second = params.num_heads, params.num_heads + params.num_kv_heads
    return heads[:, :first], heads[:, first:second], heads[:, second:]


@np.errstate(over="ignore", invalid="ignore")
def rope_write(batch: ForwardBatch, attention: ReferenceAttention, qkv: F32) -> None:
    """Rotary embedding (Su et al. 2021) of q and k in place, after their norms if any; then k and v are written to the cache."""
    params = attention.params
    q, k, v = _heads(qkv, params)
    cos, sin = params.cos[batch.positions, None, :], params.sin[batch.positions, None, :]
    half = cos.shape[-1]
    for x, norm in ((q, params.q_norm), (k, params.k_norm)):
        if norm is not None:
            x[...] = rms_norm(x, norm, params.norm_eps)
        first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin
    attention.write(batch.groups[attention.group].slot_mapping, k, v)


def attend(batch: ForwardBatch, attention: ReferenceAttention, qkv: F32, out: F32) -> None:
    """Each row attends to the cached keys from its window's start up to its own position."""
    params = attention.params
    q = _heads(qkv, params)[0] * np.float32(params.scale)
    if attention.dots:
        q = _as_bf16(q)
    q = q.reshape(len(q), params.num_kv_heads, -1, params.head_dim)
    tables = batch.groups[attention.group].block_table
    for s, (start, stop) in enumerate(zip(batch.query_start_loc[:-1], batch.query_start_loc[1:], strict=True)):
        for row in range(start, stop, TILE_ROWS):
            rows = slice(row, min(row + TILE_ROWS, stop))
            result = _attend_rows(attention, tables[s], q[rows], int(batch.positions[row]))
            out[rows] = result.reshape(len(result), -1)


def _as_bf16(x: F32) -> F32:
    return decode(encode(x, "bf16"), "bf16")


def _by_pairs(start: int, stop: int) -> Iterator[int]:
    """start .. stop - 1 with the second of each pair before the first; `start` and `stop` may cut a pair."""
    for even in range(start // 2 * 2, stop, 2):
        yield from (index for index in (even + 1, even) if start <= index < stop)


@dataclass
class _Partial:
    """The softmax of rows `rows` over one partition: maximum m, sum l (both [R, kv_heads, share]) and weighted values acc."""

    rows: slice
    m: F32
    l: F32  # noqa: E741
    acc: F32


def _rows_that_see(start: int, stop: int, position: int, count: int, window: int | None) -> slice:
    """Which of `count` rows, at positions from `position` on, see any key of start .. stop - 1: always a run of rows."""
    first = max(start - position, 0)
    last = count if window is None else min(count, stop - 1 + window - position)
    return slice(first, max(first, last))


@np.errstate(over="ignore", invalid="ignore")
def _attend_rows(attention: ReferenceAttention, table: I32, q: F32, position: int) -> F32:
    """q [R, kv_heads, share, head_dim], scaled, at consecutive positions from `position` on -> the same shape."""
    window, end = attention.params.window, position + len(q)
    begin = 0 if window is None else max(0, position - window + 1)
    partials = []
    for start in range(begin // PARTITION * PARTITION, end, PARTITION):
        keys = range(max(start, begin), min(start + PARTITION, end))
        rows = _rows_that_see(keys.start, keys.stop, position, len(q), window)
        partials.append(_partition(attention, table, q[rows], position + rows.start, keys, rows))
    return _merge(partials, q)


def _merge(partials: list[_Partial], q: F32) -> F32:
    m = np.full(q.shape[:-1], -np.inf, np.float32)
    for part in partials:
        np.maximum(m[part.rows], part.m, out=m[part.rows])
    total, out = np.zeros_like(m), np.zeros_like(q)
    for part in partials:
        weight = np.exp(part.m - m[part.rows])
        total[part.rows] += part.l * weight
        out[part.rows] += part.acc * weight[..., None]
    out /= total[..., None]
    return out


def _partition(attention: ReferenceAttention, table: I32, q: F32, position: int, keys: range, rows: slice) -> _Partial:
    window = attention.params.window
    m = np.full(q.shape[:-1], -np.inf, np.float32)
    part = _Partial(rows, m, np.zeros_like(m), np.zeros_like(q))
    for span in range(keys.start // SPAN * SPAN, keys.stop, SPAN):
        start, stop = max(span, keys.start), min(span + SPAN, keys.stop)
        see = _rows_that_see(start, stop, position, len(q), window)
        k, v = attention.read(table, start, stop)
        scores = _scores(q[see], k, position + see.start, start, window, attention.dots)
        m_new = np.maximum(part.m[see], scores.max(axis=-1))
        alpha = np.exp(part.m[see] - m_new)
        p = np.exp(scores - m_new[..., None])
        if attention.dots:
            p = _as_bf16(p)
        part.m[see] = m_new
        part.l[see] = part.l[see] * alpha + lane_sum(p)
        part.acc[see] *= alpha[..., None]
        _add_values(part.acc[see], p, v, position + see.start, start, window, attention.dots)
    return part


def _scores(q: F32, k: F32, position: int, start: int, window: int | None, dots: bool) -> F32:
    """[R, kv_heads, share, SPAN]: dot products over the head, ascending; minus infinity where a row does not see the key.
    k [kv_heads, head_dim, n] begins at absolute position `start`."""
    n = k.shape[-1]
    total = np.zeros((*q.shape[:-1], n), np.float32)
    product = np.empty_like(total)
    for d in _by_pairs(0, q.shape[-1]) if dots else range(q.shape[-1]):
        np.multiply(q[..., d, None], k[:, None, d, :], out=product)
        total += product
    age = (position + np.arange(len(q)))[:, None] - (start + np.arange(n))
    visible = (age >= 0) if window is None else (age >= 0) & (age < window)
    scores = np.full((*q.shape[:-1], SPAN), -np.inf, np.float32)
    scores[..., start % SPAN : start % SPAN + n] = np.where(visible[:, None, None, :], total, np.float32(-np.inf))
    return scores


def _add_values(acc: F32, p: F32, v: F32, position: int, start: int, window: int | None, dots: bool) -> None:
    """acc += p[key] * v[key], keys ascending, for the rows that see the key (an unseen value may be a NaN: 0 would not mask it)."""
    product = np.empty_like(acc)
    stop = start + len(v)
    for key in _by_pairs(start, stop) if dots else range(start, stop):
        see = _rows_that_see(key, key + 1, position, len(acc), window)
        np.multiply(p[see, :, :, key % SPAN, None], v[key - start, :, None, :], out=product[see])
        acc[see] += product[see]
