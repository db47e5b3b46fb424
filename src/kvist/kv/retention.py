"""What users asked to keep: claims on blocks, by priority or pinned, and until when.

A claim covers the blocks of one prefix. A block takes the highest priority among its claims, and is pinned while any of them pins
it. When a claim ends (its time is up, or it is withdrawn), its blocks are what their other claims make them, ordinary without
any. Claims that raise a priority without a pin share a budget: a new one beyond it ends the oldest, whoever made them and whatever
their priority, and one that is larger than all of it covers its first blocks only. Repeating a claim makes it new. This module
knows neither tokens, requests nor who holds a block; it says what changed, and the manager carries it out.

Many claims may stand on one block, as when each request asks to keep its prompt and all begin alike. So a block counts its claims
by what they wish, and which claims a new one covers, or is covered by, is looked for where their prefixes end: what a claim costs
goes by the blocks that it covers and the claims that stand on the last of these, and not by how many others there are.
Invariants: a block has a standing exactly if a claim that has not ended lists it; no claim is covered by another of its owner when
it is entered; `num_pinned` and `num_raised` count blocks, not claims, and stay within their budgets.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

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
    blocks: dict[int, None]
    """In the order of the prefix."""

    @property
    def raises(self) -> bool:
        return self.priority > ORDINARY_PRIORITY and not self.pin

    def covers(self, other: Claim) -> bool:
        """Whether this one makes the other superfluous."""
        lasts = self.deadline is None or (other.deadline is not None and other.deadline <= self.deadline)
        same = self.owner == other.owner and self.pin >= other.pin and self.priority >= other.priority
        return same and lasts and self.blocks.keys() >= other.blocks.keys()

    @property
    def end(self) -> int:
        """The last of its blocks, of which there is one."""
        return next(reversed(self.blocks))


class Standing:
    """The claims on one block, and how many of them wish the same: (pin, priority)."""

    __slots__ = ("claims", "wishes")

    def __init__(self) -> None:
        self.claims: dict[Claim, None] = {}
        self.wishes: dict[tuple[bool, int], int] = {}

    @property
    def is_pinned(self) -> bool:
        return any(pin for pin, _ in self.wishes)

    @property
    def priority(self) -> int:
        return max((priority for _, priority in self.wishes), default=ORDINARY_PRIORITY)

    def add(self, claim: Claim) -> None:
        self.claims[claim] = None
        wish = claim.pin, claim.priority
        self.wishes[wish] = self.wishes.get(wish, 0) + 1

    def remove(self, claim: Claim) -> None:
        del self.claims[claim]
        wish = claim.pin, claim.priority
        self.wishes[wish] -= 1
        if not self.wishes[wish]:
            del self.wishes[wish]


@dataclass(slots=True)
class Changes:
    """What a step of the books means for the pool."""

    priorities: dict[int, int]
    pinned: list[int]
    unpinned: list[int]
    crowded_out: list[int] = field(default_factory=list)
    """Blocks that have no claim any more because newer ones took the budget."""


NO_CHANGES = Changes({}, [], [])


class Retention:
    """`pin_budget` is the most blocks that may be pinned at once, `priority_budget` the most whose priority may be raised."""

    def __init__(self, pin_budget: int, priority_budget: int) -> None:
        self.pin_budget, self.priority_budget = pin_budget, priority_budget
        self.num_pinned = 0
        self.num_pin_changes = 0
        """Grows whenever blocks are pinned or no longer pinned."""
        self.by_block: dict[int, Standing] = {}
        self._ending: dict[int, dict[Claim, None]] = {}
        """By block, the claims that end there."""
        self.deadlines: list[tuple[float, int, Claim]] = []
        self._max_deadlines = MIN_DEADLINES
        self._num_claims = 0
        self._raising: OrderedDict[Claim, None] = OrderedDict()
        """The claims that raise a priority, the oldest first."""
        self._raised: Counter[int] = Counter()
        """By block, how many claims raise it."""

    @property
    def num_raised(self) -> int:
        return len(self._raised)

    def is_pinned(self, block_id: int) -> bool:
        standing = self.by_block.get(block_id)
        return standing is not None and standing.is_pinned

    def priority(self, block_id: int) -> int:
        standing = self.by_block.get(block_id)
        return ORDINARY_PRIORITY if standing is None else standing.priority

    def deadline(self, block_id: int) -> float | None:
        """When the last of a block's claims ends; None: never, or there is none."""
        deadlines = [claim.deadline for claim in self._claims_of(block_id)]
        return None if None in deadlines else max((value for value in deadlines if value is not None), default=None)

    def claims(self, block_id: int) -> bool:
        return block_id in self.by_block

    def _claims_of(self, block_id: int) -> Iterable[Claim]:
        standing = self.by_block.get(block_id)
        return () if standing is None else standing.claims

    def claim(self, owner: BlockHash, block_ids: Iterable[int], priority: int, pin: bool, deadline: float | None) -> Changes:
        """Enter a claim on the blocks of a prefix, the first first; the caller has seen that a pin is within the budget. Of claims
        that are repeated, as by every turn of a conversation, one is kept."""
        claim = Claim(owner, priority, pin, deadline, {})
        claim.blocks |= dict.fromkeys(islice(dict.fromkeys(block_ids), self.priority_budget if claim.raises else None))
        covering = [one for one in self._claims_of(claim.end) if one.covers(claim)] if claim.blocks else []
        if not claim.blocks or covering:
            for one in covering:
                if one in self._raising:
                    self._raising.move_to_end(one)
            return NO_CHANGES
        covered = [one for block_id in claim.blocks for one in self._ending.get(block_id, ()) if claim.covers(one)]
        changes = self._enter(claim)
        self._end(covered)
        if claim.raises:
            self._raising[claim] = None
            self._raised.update(claim.blocks.keys())
            self._make_room(changes)
        if deadline is not None:
            self._num_claims += 1
            heapq.heappush(self.deadlines, (deadline, self._num_claims, claim))
            self._forget_deadlines()
        return changes

    def _enter(self, claim: Claim) -> Changes:
        changes = Changes({}, [], [])
        for block_id in sorted(claim.blocks):
            if (standing := self.by_block.get(block_id)) is None:
                standing = self.by_block[block_id] = Standing()
            if claim.pin and not standing.is_pinned:
                changes.pinned.append(block_id)
            before = standing.priority
            standing.add(claim)
            if standing.priority != before:
                changes.priorities[block_id] = standing.priority
        self._ending.setdefault(claim.end, {})[claim] = None
        self._count_pins(len(changes.pinned))
        return changes

    def _make_room(self, changes: Changes) -> None:
        """End the oldest of the claims that raise a priority until all are within the budget, which the newest alone is."""
        ended: list[Claim] = []
        blocks: dict[int, None] = {}
        while len(self._raised) > self.priority_budget:
            claim = next(iter(self._raising))
            blocks |= claim.blocks
            self._lower(claim)
            ended.append(claim)
        changes.priorities.update(self._end(ended).priorities)
        changes.crowded_out += sorted(block_id for block_id in blocks if block_id not in self.by_block)

    def _lower(self, claim: Claim) -> None:
        """The claim raises nothing any more."""
        if claim in self._raising:
            del self._raising[claim]
            self._raised.subtract(claim.blocks.keys())
            for block_id in claim.blocks:
                if not self._raised[block_id]:
                    del self._raised[block_id]

    def _count_pins(self, change: int) -> None:
        self.num_pinned += change
        self.num_pin_changes += change != 0

    def withdraw(self, owner: BlockHash, block_ids: Iterable[int]) -> Changes:
        """End the owner's claims that cover any of these blocks, whole claims at a time."""
        ended: dict[Claim, None] = {}
        for block_id in block_ids:
            ended |= dict.fromkeys(claim for claim in self._claims_of(block_id) if claim.owner == owner)
        return self._end(ended)

    def expire(self, now: float) -> tuple[Changes, list[int]]:
        """End the claims whose time is up; also the blocks that have none left."""
        ended = []
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, claim = heapq.heappop(self.deadlines)
            if claim.blocks:
                ended.append(claim)
        blocks = sorted(set().union(*(claim.blocks for claim in ended)))
        changes = self._end(ended)
        return changes, [block_id for block_id in blocks if block_id not in self.by_block]

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to hold something else; none is pinned."""
        for block_id in block_ids:
            claims = self._claims_of(block_id)
            self.by_block.pop(block_id, None)
            for claim in claims:
                assert not claim.pin, f"block {block_id} is pinned and evicted"
                del claim.blocks[block_id]
                if not claim.blocks:
                    self._raising.pop(claim, None)
            for claim in self._ending.pop(block_id, ()):
                if claim.blocks:
                    self._ending.setdefault(claim.end, {})[claim] = None
            self._raised.pop(block_id, None)

    def _forget_deadlines(self) -> None:
        """Of claims that ended before their time, once they are most of all."""
        if len(self.deadlines) >= self._max_deadlines:
            self.deadlines = [entry for entry in self.deadlines if entry[2].blocks]
            heapq.heapify(self.deadlines)
            self._max_deadlines = max(MIN_DEADLINES, 2 * len(self.deadlines))

    def _end(self, ended: Iterable[Claim]) -> Changes:
        changes = Changes({}, [], [])
        for claim in ended:
            self._lower(claim)
            self._forget_end(claim)
            blocks, claim.blocks = sorted(claim.blocks), {}
            for block_id in blocks:
                standing = self.by_block[block_id]
                before, was_pinned = standing.priority, standing.is_pinned
                standing.remove(claim)
                if not standing.claims:
                    del self.by_block[block_id]
                if was_pinned and not standing.is_pinned:
                    changes.unpinned.append(block_id)
                if standing.priority != before:
                    changes.priorities[block_id] = standing.priority
        self._count_pins(-len(changes.unpinned))
        return changes

    def _forget_end(self, claim: Claim) -> None:
        if claim.blocks:
            ending = self._ending[end := claim.end]
            del ending[claim]
            if not ending:
                del self._ending[end]

    def claimed(self) -> list[int]:
        return sorted(self.by_block)

    def raised_blocks(self) -> list[int]:
        return sorted(self._raised)

    def pinned_blocks(self) -> list[int]:
        return sorted(block_id for block_id in self.by_block if self.is_pinned(block_id))

    def check_invariants(self) -> None:
        assert self.num_pinned == len(self.pinned_blocks()) <= self.pin_budget
        raised = Counter(block_id for block_id, here in self.by_block.items() for claim in here.claims if claim.raises)
        assert raised == self._raised
        assert self.num_raised <= self.priority_budget
        claims = {claim for here in self.by_block.values() for claim in here.claims}
        assert self._raising.keys() == {claim for claim in claims if claim.raises}
        for block_id, here in self.by_block.items():
            assert here.claims
            assert all(block_id in claim.blocks for claim in here.claims)
            assert here.wishes == Counter((claim.pin, claim.priority) for claim in here.claims)
        assert {(end, claim) for end, ending in self._ending.items() for claim in ending} == {(one.end, one) for one in claims}
        assert all(self._ending.values())
