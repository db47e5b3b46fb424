"""What is kept of blocks that were computed: eviction order, claims of users, and why a block that was here is gone.

It stands between the manager, which knows requests, and pool and index, which know ids and names. Cost: O(1) a block on the way of
every request; claims cost more, for the blocks they cover. It knows no requests and reads no clock: `now` is told by `advance`.
Invariants: pinned blocks are held once by the keeper; what is claimed is in the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import NamedTuple

from kvist.kv.block import BlockHash, PackedNames, Tail
from kvist.kv.eviction import POLICIES
from kvist.kv.ghosts import STRIDE, Ghosts
from kvist.kv.hints import KVHints
from kvist.kv.history import EventLog, Seen, max_event_blocks, nearest, rewritten
from kvist.kv.pool import BlockPool
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.retention import NO_CHANGES, Changes, Retention
from kvist.kv.rings import ORDINARY_PRIORITY
from kvist.kv.stretches import Removed
from kvist.kv.tiers import BlockCopy, Restore
from kvist.request import PrefixMiss

GHOSTS_PER_BLOCK = 4
"""So many evictions are remembered; conversations come back after several times the pool."""
MAX_EXPIRED = 1 << 14
TEMPLATE_TOKENS = 4
"""A prompt's last tokens may be its template's word for "now answer", which the next turn's prompt need not repeat."""
LOOK_AHEAD = STRIDE
"""Ghosts are lost at times; one of a later block tells as much. Where the policy makes no use of them, so many blocks that go
together leave one, the first: with that a miss begins."""


class Nearest(NamedTuple):
    """The known prompt that shares most with another."""

    common_tokens: int
    prompt_tokens: int
    num_tokens: int
    """Of the known one: its prompt, and with its answer."""
    seconds_ago: float


class Keeper:
    """`pin_budget` is the most blocks that may be pinned at once, `priority_budget` the share of the pool for raised priorities;
    `ended` are the latest sequences that have ended."""

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        ended: Callable[[], Iterable[Seen]],
        eviction_policy: str,
        pin_budget: int,
        priority_budget: float = 0.5,
    ) -> None:
        self.policy = POLICIES[eviction_policy](num_blocks)
        self.pool = BlockPool(num_blocks, self._evict, self.policy)
        self.retention = Retention(pin_budget, max(1, int(priority_budget * num_blocks)))
        self.events = EventLog(max_event_blocks(num_blocks))
        self.now = 0.0
        self._index = index
        self._ghosts = Ghosts(GHOSTS_PER_BLOCK * num_blocks)
        self._ended = ended
        self._lapsed: set[int] = set()
        """Cached blocks whose claims have all ended by their time."""
        self._expired: dict[BlockHash, None] = {}
        """Contents that were evicted thereafter, oldest first."""

    def enter(self, root: BlockHash, block_hashes: Sequence[BlockHash], block_ids: Sequence[int], time: float) -> None:
        """Successive blocks of a sequence were computed at `time` and are in the index now."""
        if block_ids:
            self._enter(block_hashes, block_ids)
            self.events.add_of(time, "stored", "", root, block_hashes)

    def enter_restored(self, restore: Restore, tokens: array[int], copies: Sequence[BlockCopy], filled: Sequence[bool]) -> bool:
        """A tier has brought what was missing of a prefix, which has these tokens, as far as it is `filled`; whether any of it was
        still missing."""
        brought = {}
        tail, names, root = restore.tail(self._index.block_size), restore.names(), restore.root
        for copy, block, good in zip(copies, restore.blocks, filled, strict=True):
            if not good:
                continue
            if tail is not None and copy.block_hash == tail.name:
                new = self._index.insert_tail(copy.group, root, tail, copy.block_id)
            else:
                new = bool(self._index.insert(copy.group, root, names, block, [copy.block_id], tokens)[0])
            if new:
                self._enter([copy.block_hash], [copy.block_id])
                brought[copy.block_hash] = root
        self.tell("stored", "restored", brought)
        return bool(brought)

    def _enter(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        self.pool.mark_cached(block_ids)
        if self._expired:
            for block_hash in block_hashes:
                self._expired.pop(block_hash, None)
        if self.policy.remembers:
            self.policy.enter(block_ids, self._ghosts.memos(block_hashes))

    def advance(self, now: float) -> float:
        """Returns when the next claim ends; inf: there is none."""
        self.now = now
        if not (deadlines := self.retention.deadlines):
            return inf
        if deadlines[0][0] <= now:
            changes, free_of_claims = self.retention.expire(now)
            self._lapsed.update(free_of_claims)
            self._tell("expired", free_of_claims)
            self._carry_out(changes)
        return deadlines[0][0] if deadlines else inf

    def claim(self, root: BlockHash, block_ids: Sequence[int], hints: KVHints) -> None:
        """Keep these blocks, the first of a prefix first."""
        deadline = None if hints.ttl is None else self.now + hints.ttl
        priority = ORDINARY_PRIORITY if hints.priority is None else hints.priority
        changes = self.retention.claim(root, block_ids, priority, hints.pin, deadline)
        self._carry_out(changes)
        kept = [block_id for block_id in block_ids if self.retention.claims(block_id)]
        self._lapsed.difference_update(kept)
        self._tell("retained", kept)
        self._tell("withdrawn", changes.crowded_out, "priority_budget")

    def withdraw(self, root: BlockHash, block_ids: Sequence[int]) -> int:
        """End the claims of `root` on these blocks. Returns how many blocks are no longer pinned."""
        claimed = [block_id for block_id in block_ids if self.retention.claims(block_id)]
        changes = self.retention.withdraw(root, block_ids)
        self._tell("withdrawn", [block_id for block_id in claimed if not self.retention.claims(block_id)])
        self._carry_out(changes)
        return len(changes.unpinned)

    def forget(self, block_ids: list[int], reason: str) -> None:
        """What these cached blocks hold, which nobody does."""
        if block_ids:
            self._remove(block_ids, reason)
            self.pool.drop(block_ids)

    def succeed(self, block_id: int, other: int) -> bool:
        """Let a held block be found in the place of another of its content, if nobody holds or claims that; whether it is. What
        follows it is held then or used later, so the other would be evicted from before it."""
        if self.pool.ref_count(other) or self.retention.claims(other):
            return False
        self._index.replace(block_id, other)
        self.pool.succeed(block_id, other)
        if other in self._lapsed:
            self._lapsed.discard(other)
            self._lapsed.add(block_id)
        return True

    def enter_tail(self, root: BlockHash, tail: Tail, block_ids: Sequence[int]) -> bool:
        """Let a sequence's last block, which is not full, be found, one a group; whether it is."""
        for group, block_id in enumerate(block_ids):
            if self._index.insert_tail(group, root, tail, block_id):
                self.enter(root, [tail.name], [block_id], self.now)
        return all(self._index.get_tail(group, tail.name) is not None for group in range(len(block_ids)))

    def forget_tail(self, name: BlockHash) -> None:
        """Nobody finds this block, which is not full, any more."""
        ids = [self._index.get_tail(group, name) for group in range(self._index.num_groups)]
        free = [block_id for block_id in ids if block_id is not None and not self.pool.ref_count(block_id)]
        self.forget(free, "superseded")

    def ways(self, match: PrefixMatch, *, own: bool) -> list[PrefixMatch]:
        """How the hit `match` may be used, the best first: where what is copied are tails that nobody holds, and no more than they
        hold, they can be taken over, which takes no blocks to copy to. It hides them from others, so that comes first only where
        a request finds its `own` again."""
        ways = match.ways()
        tails = [self._index.tail_tokens(block_id) == match.num_copied for block_id in match.copied_from]
        if tails and all(tails) and not any(map(self.pool.ref_count, match.copied_from)):
            ways.insert(0 if own else 1, match._replace(takes_over=True))
        return ways

    def hold_beginning(self, match: PrefixMatch) -> None:
        """Hold what is copied from, or taken over: then nobody finds it any more."""
        block_ids = match.copied_from
        if not match.takes_over:
            self.pool.share(block_ids)
            return
        self.forget(list(block_ids[::-1]), "superseded")
        taken = self.pool.take(len(block_ids))
        assert taken == list(block_ids), "what was dropped last is taken first"

    def explain(
        self, root: BlockHash, token_ids: Sequence[int], hashes: Sequence[BlockHash], position: int, block_size: int
    ) -> PrefixMiss:
        """Why the block at `position`, which whole blocks of a prompt reach to or pass, is not found."""
        missing = hashes[position // block_size :][:LOOK_AHEAD]
        if missing and missing[0] in self._expired:
            return PrefixMiss("expired", position, self._ghosts.evicted_ago(missing, self.now))
        if (ago := self._ghosts.evicted_ago(missing, self.now)) is not None:
            return PrefixMiss("evicted", position, ago)
        place = rewritten(self._ended(), root, token_ids, hashes, block_size, TEMPLATE_TOKENS)
        if place is not None and place >= position:
            return PrefixMiss("rewritten", place)
        return PrefixMiss("never_seen", position)

    def nearest(self, root: BlockHash, token_ids: Sequence[int], hashes: Sequence[BlockHash], block_size: int) -> Nearest | None:
        found = nearest(self._ended(), root, token_ids, hashes, block_size)
        if found is None:
            return None
        seen, common = found
        return Nearest(common, seen.num_prompt_tokens or 0, len(seen.prompt), self.now - seen.time)

    def _evict(self, block_ids: list[int]) -> None:
        self._remove(block_ids, "evicted")

    def _remove(self, block_ids: list[int], reason: str) -> None:
        if not block_ids:
            return
        removed, remembers, now = self._index.remove(block_ids), self.policy.remembers, self.now
        for piece in removed:
            if remembers:
                self._ghosts.put(piece.names, self.policy.leave(piece.block_ids), now)
            else:
                self._ghosts.put_some(piece.names, now)
        if len(removed) == 1:
            self.events.add_packed(now, "removed", reason, removed[0].root, removed[0].names)
        else:
            for root, pieces in groupby(removed, attrgetter("root")):
                self.events.add_packed(now, "removed", reason, root, b"".join([piece.names for piece in pieces]))
        if self.retention.by_block:
            for block_id in block_ids:
                if self.retention.claims(block_id):
                    self.policy.set_priority(block_id, ORDINARY_PRIORITY)
            self.retention.forget(block_ids)
        if self._lapsed:
            self._forget_lapsed(removed)

    def _forget_lapsed(self, removed: Sequence[Removed]) -> None:
        for piece in removed:
            for block_id, block_hash in zip(piece.block_ids, PackedNames(piece.names), strict=True):
                if block_id in self._lapsed:
                    self._lapsed.discard(block_id)
                    self._expired[block_hash] = None
        while len(self._expired) > MAX_EXPIRED:
            del self._expired[next(iter(self._expired))]

    def tell(self, kind: str, reason: str, blocks: Mapping[BlockHash, BlockHash | None], tier: str = "device") -> None:
        """What happened to these blocks, each with its root where that is known."""
        self.events.add(self.now, kind, reason, tuple(blocks.values()), list(blocks), tier)

    def _tell(self, kind: str, block_ids: Sequence[int], reason: str = "") -> None:
        named = [(name, self._index.root_of(block_id)) for block_id in block_ids if (name := self._index.hash_of(block_id))]
        self.events.add(self.now, kind, reason, tuple(root for _, root in named), [name for name, _ in named])

    def _carry_out(self, changes: Changes) -> None:
        if changes is NO_CHANGES:
            return
        self.pool.share(changes.pinned)
        for block_id, priority in changes.priorities.items():
            self.pool.set_priority(block_id, priority)
        self.pool.release(changes.unpinned[::-1])

    def check_invariants(self) -> None:
        self.retention.check_invariants()
        for block_id in range(self.pool.num_blocks):
            if self.retention.claims(block_id) or block_id in self._lapsed:
                assert self._index.hash_of(block_id) is not None, f"block {block_id} is claimed and holds nothing"
