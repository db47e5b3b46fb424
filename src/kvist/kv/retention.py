"""What users asked to keep: claims on blocks, by priority or pinned, and until when.

A claim covers the blocks of one prefix. A block takes the highest priority among its claims, and is pinned while any of them pins
it. When a claim ends (its time is up, or it is withdrawn), its blocks are what their other claims make them, ordinary without
any. This module knows neither tokens, requests nor who holds a block; it says what changed, and the manager carries it out.
Invariants: a block is in `claims of a block` exactly if a claim that has not ended lists it; no claim is covered by another of
its owner when it is entered; `num_pinned` counts blocks, not claims.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvist.kv.block import BlockHash
from kvist.kv.rings import ORDINARY_PRIORITY

MIN_DEADLINES = 64


@dataclass(slots=True, eq=False)
class Claim:
    owner: BlockHash
    """The root of its prefix: who may withdraw it."""
    priority: int
    pin: bool
    deadline: float | None
    blocks: set[int]

    def covers(self, other: Claim) -> bool:
        """Whether this one makes the other superfluous."""
        lasts = self.deadline is None or (other.deadline is not None and other.deadline <= self.deadline)
        same = self.owner == other.owner and self.pin >= other.pin and self.priority >= other.priority
        return same and lasts and self.blocks >= other.blocks


@dataclass(slots=True)
class Changes:
    """What a step of the books means for the pool."""

    priorities: dict[int, int]
    pinned: list[int]
    unpinned: list[int]


NO_CHANGES = Changes({}, [], [])


class Retention:
    """`pin_budget` is the most blocks that may be pinned at once."""

    def __init__(self, pin_budget: int) -> None:
        self.pin_budget = pin_budget
        self.num_pinned = 0
        self.num_expired = 0
        """Claims whose time was up, since the start."""
        self._claims: dict[int, list[Claim]] = {}
        self._deadlines: list[tuple[float, int, Claim]] = []
        self._max_deadlines = MIN_DEADLINES
        self._num_claims = 0

    def __bool__(self) -> bool:
        return bool(self._claims)

    def is_pinned(self, block_id: int) -> bool:
        return any(claim.pin for claim in self._claims.get(block_id, ()))

    def priority(self, block_id: int) -> int:
        return max((claim.priority for claim in self._claims.get(block_id, ())), default=ORDINARY_PRIORITY)

    def deadline(self, block_id: int) -> float | None:
        """When the last of a block's claims ends; None: never, or there is none."""
        deadlines = [claim.deadline for claim in self._claims.get(block_id, ())]
        return None if None in deadlines else max((value for value in deadlines if value is not None), default=None)

    def claims(self, block_id: int) -> bool:
        return block_id in self._claims

    def newly_pinned(self, block_ids: Iterable[int]) -> int:
        """How many blocks a pin of these would add to `num_pinned`."""
        return sum(not self.is_pinned(block_id) for block_id in set(block_ids))

    def claim(self, owner: BlockHash, block_ids: Iterable[int], priority: int, pin: bool, deadline: float | None) -> Changes:
        """Enter a claim; the caller has seen that a pin is within the budget. Of claims that are repeated, as by every turn of a
        conversation, one is kept."""
        claim = Claim(owner, priority, pin, deadline, set(block_ids))
        known = {one for block_id in claim.blocks for one in self._claims.get(block_id, ())}
        if not claim.blocks or any(one.covers(claim) for one in known):
            return NO_CHANGES
        changes = Changes({}, [], [])
        for block_id in sorted(claim.blocks):
            if pin and not self.is_pinned(block_id):
                changes.pinned.append(block_id)
            before = self.priority(block_id)
            self._claims.setdefault(block_id, []).append(claim)
            if self.priority(block_id) != before:
                changes.priorities[block_id] = self.priority(block_id)
        self.num_pinned += len(changes.pinned)
        self._end(one for one in known if claim.covers(one))
        if deadline is not None:
            self._num_claims += 1
            heapq.heappush(self._deadlines, (deadline, self._num_claims, claim))
            self._forget_deadlines()
        return changes

    def withdraw(self, owner: BlockHash, block_ids: Iterable[int]) -> Changes:
        """End the owner's claims that cover any of these blocks, whole claims at a time."""
        ended: list[Claim] = []
        for block_id in block_ids:
            ended += [claim for claim in self._claims.get(block_id, ()) if claim.owner == owner and claim not in ended]
        return self._end(ended)

    def expire(self, now: float) -> tuple[Changes, list[int]]:
        """End the claims whose time is up; also the blocks that have none left."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return NO_CHANGES, []
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, claim = heapq.heappop(self._deadlines)
            if claim.blocks:
                ended.append(claim)
        self.num_expired += len(ended)
        blocks = sorted(set().union(*(claim.blocks for claim in ended)))
        changes = self._end(ended)
        return changes, [block_id for block_id in blocks if block_id not in self._claims]

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to hold something else; none is pinned."""
        for block_id in block_ids:
            for claim in self._claims.pop(block_id, ()):
                assert not claim.pin, f"block {block_id} is pinned and evicted"
                claim.blocks.discard(block_id)

    def _forget_deadlines(self) -> None:
        """Of claims that ended before their time, once they are most of all."""
        if len(self._deadlines) >= self._max_deadlines:
            self._deadlines = [entry for entry in self._deadlines if entry[2].blocks]
            heapq.heapify(self._deadlines)
            self._max_deadlines = max(MIN_DEADLINES, 2 * len(self._deadlines))

    def _end(self, ended: Iterable[Claim]) -> Changes:
        changes = Changes({}, [], [])
        for claim in ended:
            blocks, claim.blocks = sorted(claim.blocks), set()
            for block_id in blocks:
                before, was_pinned = self.priority(block_id), self.is_pinned(block_id)
                left = self._claims[block_id]
                left.remove(claim)
                if not left:
                    del self._claims[block_id]
                if was_pinned and not self.is_pinned(block_id):
                    changes.unpinned.append(block_id)
                if self.priority(block_id) != before:
                    changes.priorities[block_id] = self.priority(block_id)
        self.num_pinned -= len(changes.unpinned)
        return changes

    def claimed(self) -> list[int]:
        return sorted(self._claims)

    def pinned_blocks(self) -> list[int]:
        return sorted(block_id for block_id in self._claims if self.is_pinned(block_id))

    def check_invariants(self) -> None:
        assert self.num_pinned == len(self.pinned_blocks()) <= self.pin_budget
        for block_id, claims in self._claims.items():
            assert claims
            assert all(block_id in claim.blocks for claim in claims)
