"""How often each cached prefix was found, and when it was used last: counted once a request, at the block where its hit ended.

A request that found a block has found all before it, so a block's finds are those noted at it and at all blocks behind it: whoever
asks adds them up, and a request costs O(1) however long its prefix is. When a block is evicted, what was noted at it goes to the
block before it; prefixes are evicted from their tails inwards, so nothing is lost as long as that one is still there. This module
knows no requests and reads no clock. Invariant: only blocks in `_ends` have something noted, and all of these are indexed in the
first group.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvist.kv.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class UseListing:
    """What is noted at each block id at one moment."""

    finds: Sequence[int]
    used_at: Sequence[float]
    """In 32 bits of precision; -inf: nothing is noted."""

    def of(self, block_ids: Sequence[int]) -> tuple[int, float]:
        """Of a block, from itself and all blocks behind it: how many requests found it, and when it was used last."""
        return sum(map(self.finds.__getitem__, block_ids)), max(map(self.used_at.__getitem__, block_ids))


class PrefixUses:
    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._finds = array("I", bytes(4 * num_blocks))
        self._used_at = array("f", [-inf]) * num_blocks
        self._ends: set[int] = set()

    def found(self, block_id: int, now: float) -> None:
        """A request's hit ends with this block."""
        self._note(block_id, 1, now)

    def left(self, block_id: int, now: float) -> None:
        """A request has let go of its blocks, of which this is the last."""
        self._note(block_id, 0, now)

    def evict(self, block_ids: Sequence[int]) -> None:
        """These blocks are about to leave the index."""
        if self._ends.isdisjoint(block_ids):
            return
        index, ends = self._index, self._ends
        if index.num_groups > 1:
            block_ids = [block_id for block_id in block_ids if index.group_of(block_id) == 0]
        noted = [block_id for block_id in block_ids if block_id in ends]
        parents = index.parents(block_ids)
        if parents[:-1] == index.names(block_ids[1:]):
            # Mostly it is one tail: what is noted in it goes past all of it at once.
            moves: list[tuple[Sequence[int], int | None]] = [(noted, index.get(0, parents[-1]))]
        else:
            moves = self._one_by_one(noted, set(block_ids))
        for sources, target in moves:
            finds, used_at = UseListing(self._finds, self._used_at).of(sources)
            for block_id in sources:
                self._finds[block_id], self._used_at[block_id] = 0, -inf
                ends.discard(block_id)
            if target is not None:
                self._note(target, finds, used_at)

    def _one_by_one(self, noted: Sequence[int], leaving: set[int]) -> list[tuple[Sequence[int], int | None]]:
        """Each block with the nearest one before it that stays; every block is passed once."""
        stays: dict[int, int | None] = {}
        for block_id in noted:
            path: list[int] = []
            before: int | None = block_id
            while before is not None and before in leaving and before not in stays:
                path.append(before)
                before = self._index.get(0, self._index.parents([before])[0])
            end = before if before is None else stays.get(before, before)
            stays.update(dict.fromkeys(path, end))
        return [([block_id], stays[block_id]) for block_id in noted]

    def _note(self, block_id: int, finds: int, now: float) -> None:
        self._finds[block_id] += finds
        self._used_at[block_id] = max(self._used_at[block_id], now)
        self._ends.add(block_id)

    def listing(self) -> UseListing:
        """A copy: what it costs is the copying of arrays."""
        return UseListing(self._finds[:], self._used_at[:])

    def check_invariants(self) -> None:
        for block_id, (finds, used_at) in enumerate(zip(self._finds, self._used_at, strict=True)):
            assert (used_at > -inf) == (block_id in self._ends)
            assert not finds or block_id in self._ends
        for block_id in self._ends:
            assert self._index.hash_of(block_id) is not None
            assert self._index.group_of(block_id) == 0
