"""How often each cached prefix was found, and when it was used last: noted once a request, at the block where its hit ended.

A request that found a block has found all before it, so a block's finds are those noted at it and at all blocks behind it:
whoever asks adds them up, and a request costs O(1) however long its prefix is. When a block with a note is evicted, the note
moves to its anchor, an earlier block of the prefix: where the hit of the request that had computed it ended, or the prefix's
first block. So the beginning of a prefix loses few finds (those whose anchor was evicted before and came back without a note),
and the runs between lose those that ended in what is gone: moving a note block by block would cost something for every block that
is evicted. This module knows no requests and reads no clock. Invariant: the blocks with an anchor are those that have something
noted, and all of these are indexed in the first group.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from kvist.kv.block import BlockHash
from kvist.kv.prefix import PrefixIndex

FEW = 4
"""So few lookups cost less in a list than making a set of it."""


_Anchor = tuple[BlockHash, tuple[int, BlockHash] | None]
"""The name of a prefix's first block; id and name of the block with which a hit ended."""


class UseListing(NamedTuple):
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
        self._anchors: dict[int, _Anchor] = {}

    def found(self, block_id: int, first: BlockHash, now: float) -> None:
        """A request's hit ends with this block, in a prefix that begins with `first`."""
        self._anchors.setdefault(block_id, (first, None))
        self._note(block_id, 1, now)

    def left(self, block_id: int, first: BlockHash, hit: tuple[int, BlockHash] | None, now: float) -> None:
        """A request has let go of its blocks, of which this is the last; its hit had ended before it, with the block `hit`."""
        if hit is None:
            self._anchors.setdefault(block_id, (first, None))
        else:
            self._anchors[block_id] = (first, hit)
        self._note(block_id, 0, now)

    def evict(self, block_ids: Collection[int]) -> None:
        """These blocks are about to leave the index."""
        anchors = self._anchors
        noted = list(filter(anchors.__contains__, block_ids))
        leaving = block_ids if len(noted) < FEW else set(block_ids)
        for block_id in noted:
            target = self._anchor_that_stays(block_id, leaving)
            if target is not None:
                anchors.setdefault(target, anchors[block_id])
                self._note(target, self._finds[block_id], self._used_at[block_id])
            self._finds[block_id], self._used_at[block_id] = 0, -inf
        for block_id in noted:
            del anchors[block_id]

    def _anchor_that_stays(self, block_id: int, leaving: Collection[int]) -> int | None:
        """A first block is its own anchor, and with it all of the prefix is gone."""
        before: int | None = block_id
        while before is not None and before in leaving:
            anchor = self._anchors.get(before)
            after = None if anchor is None else self._find(anchor)
            before = None if after == before else after
        return before

    def _find(self, anchor: _Anchor) -> int | None:
        """Its block, or the prefix's first where that is gone."""
        first, hit = anchor
        if hit is not None and self._index.hash_of(hit[0]) == hit[1]:
            return hit[0]
        return self._index.get_tail(0, first)

    def _note(self, block_id: int, finds: int, now: float) -> None:
        self._finds[block_id] += finds
        self._used_at[block_id] = max(self._used_at[block_id], now)

    def listing(self) -> UseListing:
        """A copy: what it costs is the copying of arrays."""
        return UseListing(self._finds[:], self._used_at[:])

    def check_invariants(self) -> None:
        for block_id, (finds, used_at) in enumerate(zip(self._finds, self._used_at, strict=True)):
            assert (used_at > -inf) == (block_id in self._anchors)
            assert not finds or block_id in self._anchors
        for block_id in self._anchors:
            assert self._index.hash_of(block_id) is not None
            assert self._index.group_of(block_id) == 0
