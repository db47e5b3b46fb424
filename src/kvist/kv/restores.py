"""Blocks that go to a tier and come back: what would lengthen a hit, the blocks held for it, and their way into the index.

It joins a tier's books with the pool, for the paged manager. Invariant: a plan's blocks are held once by it from `prepare` to
`complete`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.kv.block import BlockHash
from kvist.kv.keeper import Keeper
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.tiers import Restore, TierDecider, TransferPlan


class Restores:
    def __init__(self, tier: TierDecider, keeper: Keeper, index: PrefixIndex) -> None:
        self._tier, self._keeper, self._index = tier, keeper, index
        self._under_way: dict[int, Restore] = {}

    def find(self, root: BlockHash, hashes: Sequence[BlockHash], num_tokens: int, match: PrefixMatch) -> Restore | None:
        """What the tier would add to the hit `match` of a prompt."""
        limit, found = (num_tokens - 1) // self._index.block_size, match.whole().num_tokens
        return None if found == limit * self._index.block_size else self._tier.beyond(self._index, root, hashes, limit, found)

    def prepare(self, restore: Restore, match: PrefixMatch) -> TransferPlan | None:
        """Hold blocks for it, and none of the hit `match`; None, and nothing changed, when too few are free."""
        pool = self._keeper.pool
        hit = [block_id for ids, first in zip(match.block_ids, match.first_blocks, strict=True) for block_id in ids[first:]]
        pool.share(hit)
        taken = pool.take(len(restore.missing))
        pool.release(hit[::-1])
        if taken is None:
            return None
        plan = self._tier.prepare(restore, taken)
        self._under_way[plan.plan_id] = restore
        return plan

    def complete(self, plan_id: int, filled: Sequence[bool]) -> None:
        """Enter what was brought into the index, and let go of the plan's blocks."""
        copies = self._tier.complete(plan_id).copies
        self._keeper.enter_restored(self._under_way.pop(plan_id), copies, filled)
        self._keeper.pool.release([copy.block_id for copy in reversed(copies)])

    def offer(self, record: Record, let_go: Sequence[int]) -> bool:
        """Offer the tier what it lacks of a request's committed blocks. Whether it can be brought back sooner than computed."""
        num_blocks, stop = 0, record.num_committed
        if not stop:
            return False
        for group, (table, start) in enumerate(zip(record.tables, let_go, strict=True)):
            self._tier.offer(group, record.hashes[start:stop], table[start:stop], record.root)
            num_blocks += stop - min(start, stop)
        return self._tier.is_cheaper(num_blocks, stop * self._index.block_size)
