"""How block tables of paged memory grow and shrink.

Any free block serves anywhere (PagedAttention, Kwon et al. 2023, section 4): only a sequence's last block has waste. All tables of
a sequence (one per KV group) grow together, all or nothing. Who holds a block and what it contains is known to pool and index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvist.kv.pool import BlockPool
from kvist.kv.prefix import PrefixMatch
from kvist.kv.spec import first_block


def grow(pool: BlockPool, tables: Sequence[array[int]], num_blocks: int) -> bool:
    """Append `num_blocks` block ids to every table; False, and nothing changed, when there is no room."""
    num_tables = len(tables)
    taken = pool.take(num_blocks * num_tables)
    if taken is None:
        return False
    for offset, table in enumerate(tables):
        table.extend(taken if num_tables == 1 else taken[offset::num_tables])
    return True


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
    the request keeps them; free ones leave the free queue like new ones, and what is copied from, if it is not taken over, stays
    until it has been."""
    last = (num_tokens - 1) // block_size
    need = 0 if match.takes_over else sum(pool.ref_count(block_id) == 0 for block_id in match.copied_from)
    for window, ids, first in zip(windows, match.block_ids, match.first_blocks, strict=True):
        keep = first_block(last * block_size, window, block_size)
        need += last + 1 - keep
        need -= sum(pool.ref_count(block_id) > 0 for block_id in ids[max(first, keep) :])
    return need
