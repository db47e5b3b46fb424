"""Blocks that go to a tier and come back: what would lengthen a hit, the blocks held for it, and their way into the index.

It joins a tier's books with the pool, for the paged manager. Invariant: a plan's blocks are held once by it from `prepare` to
`complete`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvist.kv.block import Tail
from kvist.kv.keeper import Keeper
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.tiers import Restore, TierDecider, TransferPlan
from kvist.kv.trails import Trails
from kvist.request import Request


class Restores:
    def __init__(self, tier: TierDecider, keeper: Keeper, index: PrefixIndex, trails: Trails) -> None:
        self._tier, self._keeper, self._index, self._trails = tier, keeper, index, trails
        self._under_way: dict[int, tuple[Restore, Record]] = {}

    def find(self, request: Request, record: Record, match: PrefixMatch) -> Restore | None:
        """What the tier would add to the hit `match` of a request."""
        return self._tier.beyond(self._index, record.root, record.hashes, request.num_tokens, match, request.token_ids)

    def prepare(self, restore: Restore, record: Record, match: PrefixMatch) -> TransferPlan | None:
        """Hold blocks for it, and none of the hit `match`, nor of what it needs besides and is here; None, and nothing changed,
        when too few are free."""
        pool = self._keeper.pool
        hit = [block_id for ids, first in zip(match.block_ids, match.first_blocks, strict=True) for block_id in ids[first:]]
        kept = list(dict.fromkeys([*hit, *restore.here]))
        pool.keep(kept)
        taken = pool.take(len(restore.missing))
        pool.release(kept[::-1])
        if taken is None:
            return None
        plan = self._tier.prepare(restore, taken)
        self._under_way[plan.plan_id] = restore, record
        return plan

    def complete(self, plan_id: int, filled: Sequence[bool]) -> int:
        """Enter what was brought into the index, and let go of the plan's blocks. Returns up to which token of the prefix all of it
        came; the plan's start, where what came was here already."""
        copies, (restore, record) = self._tier.complete(plan_id).copies, self._under_way.pop(plan_id)
        tokens = record.tokens[: restore.length * self._index.block_size]
        if restore.follower is not None:
            tokens += restore.follower.tokens
        brought = self._keeper.enter_restored(restore, tokens, copies, filled)
        if restore.follower is not None:
            self._lead_to(restore, tokens)
        self._keeper.pool.release([copy.block_id for copy in reversed(copies)])
        gaps = [block * self._index.block_size for block, good in zip(restore.blocks, filled, strict=True) if not good]
        return max(restore.start, min([restore.stop, *gaps])) if brought else restore.start

    def _lead_to(self, restore: Restore, tokens: array[int]) -> None:
        """Have the block behind the whole ones found by what it begins with, if all that is needed for it is here."""
        length, follower, tail = restore.length, restore.follower, restore.tail(self._index.block_size)
        assert follower is not None
        last, names = self._index.get(0, restore.hashes, length - 1) if length else None, restore.names()
        here = [self._index.get(group, names, length) is not None for group in range(self._index.num_groups)]
        if not all(here) or (length and last is None):
            return
        hashes = [*restore.hashes[:length], *([] if tail else [follower.name])]
        for name in self._trails.brought(restore.root, hashes, tokens, last, tail):
            self._keeper.forget_tail(name)

    def offer(self, record: Record, starts: Sequence[int]) -> bool:
        """Offer the tier what it lacks of a request's committed blocks, of each group from its start on; whether it keeps them all
        now."""
        stop, size, kept = record.num_committed, self._index.block_size, True
        for group, (table, start) in enumerate(zip(record.tables, starts, strict=True)):
            if start < stop:
                parent, tokens = record.hashes[start - 1] if start else record.root, record.tokens[start * size : stop * size]
                kept &= self._tier.offer(group, record.root, parent, record.hashes[start:stop], table[start:stop], tokens)
        return kept

    def renew(self, record: Record, let_go: Sequence[int]) -> None:
        """Offer again what the tier has let go of a hit: to it that was old, as what is used on the device is never read there."""
        if self._tier.renews:
            self.offer(record, let_go)

    def swap(self, record: Record, let_go: Sequence[int], tail: Tail | None, request: Request) -> bool:
        """Offer all, with the last block, which is not full, if that is a `tail`. Whether it can be brought back sooner than
        computed."""
        kept, num_tokens = self.offer(record, let_go), record.num_committed * self._index.block_size
        num_blocks = sum(max(0, record.num_committed - start) for start in let_go)
        if tail is not None:
            kept &= self.offer_tail(record, tail, request)
            num_blocks, num_tokens = num_blocks + len(record.tables), num_tokens + tail.num_tokens
        return kept and num_blocks > 0 and self._tier.is_cheaper(num_blocks, num_tokens)

    def offer_tail(self, record: Record, tail: Tail, request: Request) -> bool:
        """Offer the last block, which is not full, of a request that loses its blocks; whether it is kept now."""
        start, kept = tail.block * self._index.block_size, True
        tokens = array("I", request.token_ids(start, start + tail.num_tokens))
        for group, table in enumerate(record.tables):
            kept &= self._tier.offer(group, record.root, tail.parent, [tail.name], [table[tail.block]], tokens)
        return kept
