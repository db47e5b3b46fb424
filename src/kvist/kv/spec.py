"""The one byte formula, how layers are grouped, and how many blocks a request takes (leaf: any room may import it).

A KV group is a set of layers that share a shape and a window, and so one block table. Layers are split into groups of equal
bytes per block, so that one pool of block ids serves all groups. This module knows sizes only: no ids, no arrays.
Source of the formula: keys and values of one token take 2 x layers x kv_heads x head_dim x bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

BYTES_PER_ELEMENT = {"bf16": 2, "f16": 2, "f32": 4}
PER_TOKEN_FORMATS = frozenset(BYTES_PER_ELEMENT)
"""Formats in which a token's bytes depend on that token alone, and not on others of its block."""


class KVGroup(NamedTuple):
    """Layers (model indices, ascending) with one window (in tokens; None: full attention)."""

    layers: tuple[int, ...]
    window: int | None


class KVSpec(NamedTuple):
    """What the KV cache of one model in one format looks like."""

    num_kv_heads: int
    head_dim: int
    kv_format: str
    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def layers_per_group(self) -> int:
        return len(self.groups[0].layers)

    @property
    def bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT[self.kv_format]

    @property
    def block_bytes(self) -> int:
        """One block of the arena: `block_size` tokens of one group's layers."""
        return self.block_size * self.layers_per_group * self.bytes_per_token_layer

    @property
    def bytes_per_token(self) -> int:
        """One token in all layers (of a model whose windows are not yet full)."""
        return sum(len(group.layers) for group in self.groups) * self.bytes_per_token_layer

    @property
    def copies_beginnings(self) -> bool:
        """Whether the first tokens of a block serve another sequence, by copy, that goes on differently."""
        return self.kv_format in PER_TOKEN_FORMATS

    def request_blocks(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that a request holds at once while it grows to `num_tokens` row by row.

        A row that opens a block holds the most; from block to block that number never falls, so the last opened block decides.
        A longer chunk holds more for one step; the scheduler cuts it to the blocks that are free.
        """
        last = (num_tokens - 1) // self.block_size
        return sum(last + 1 - first_block(last * self.block_size, group.window, self.block_size) for group in self.groups)

    def max_request_tokens(self, num_blocks: int, limit: int) -> int:
        """The most tokens, up to `limit`, that one request alone can have in a pool of `num_blocks`."""
        low, high = 0, -(-limit // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(limit, low * self.block_size)

    def max_span_tokens(self, num_blocks: int, limit: int) -> int:
        """The same where each group keeps one run of blocks for the whole request, windows or not."""
        return min(limit, num_blocks // len(self.groups) * self.block_size)


def first_block(position: int, window: int | None, block_size: int) -> int:
    """The first logical block that a row at `position` reads: a windowed row sees keys position - window + 1 .. position."""
    if window is None or position < window:
        return 0
    return (position - window + 1) // block_size


def group_layers(windows: tuple[int | None, ...]) -> tuple[KVGroup, ...]:
    """Split layers, given each layer's window, into groups with equally many layers (so equal bytes per block).

    Full-attention groups come first, then windows ascending; within one window, layers stay in model order.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in by_window.values()))
    order = sorted(by_window, key=lambda window: (window is not None, window or 0))
    return tuple(
        KVGroup(tuple(by_window[window][start : start + size]), window)
        for window in order
        for start in range(0, len(by_window[window]), size)
    )
