"""How block tables grow: the `Allocator` protocol and the paged allocator.

An allocator decides which block ids a sequence's tables get; who holds a block and what it contains is known to the pool and the
index. All tables of a sequence (one per KV group) grow together, all or nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from kvist.kv.pool import BlockPool
from kvist.kv.prefix import PrefixMatch
from kvist.kv.spec import first_block


class Allocator(Protocol):
    """Grows the block tables of one sequence at a time."""

    def grow(self, tables: Sequence[array[int]], num_blocks: int) -> bool:
        """Append `num_blocks` block ids to every table; False, and nothing changed, when there is no room."""

    def give_back(self, block_ids: Sequence[int]) -> int:
        """Let go of blocks, in the order in which they may be reused. Returns how many became free."""


class PagedAllocator:
    """Any free block serves anywhere (PagedAttention, Kwon et al. 2023, section 4): only a sequence's last block has waste."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def grow(self, tables: Sequence[array[int]], num_blocks: int) -> bool:
        num_tables = len(tables)
        taken = self._pool.take(num_blocks * num_tables)
        if taken is None:
            return False
        for offset, table in enumerate(tables):
            table.extend(taken if num_tables == 1 else taken[offset::num_tables])
        return True

    def give_back(self, block_ids: Sequence[int]) -> int:
        return self._pool.release(block_ids)


def tails_first(tables: Sequence[array[int]], starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The entries [starts[g], ends[g]) of each table g, the last block first and the groups side by side."""
    if len(tables) == 1:
        return tables[0][starts[0] : ends[0]][::-1].tolist()
    return [
        table[block]
        for block in range(max(ends) - 1, min(starts) - 1, -1)
        for table, start, end in zip(tables, starts, ends, strict=True)
        if start <= block < end
    ]


def blocks_to_admit(pool: BlockPool, windows: Sequence[int | None], block_size: int, num_tokens: int, match: PrefixMatch) -> int:
    """Free blocks that all tokens of a request need after the hit `match`. Hit blocks that others hold cost nothing as long as
    the request keeps them; free ones leave the free queue like new ones, and what is copied from stays until it has been."""
    last = (num_tokens - 1) // block_size
    need = sum(pool.ref_count(block_id) == 0 for block_id in match.copied_from)
    for window, ids, first in zip(windows, match.block_ids, match.first_blocks, strict=True):
        keep = first_block(last * block_size, window, block_size)
        need += last + 1 - keep
        need -= sum(pool.ref_count(block_id) > 0 for block_id in ids[max(first, keep) :])
    return need
