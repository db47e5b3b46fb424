"""Which cached block is reused first: the `EvictionPolicy` protocol and the policies by name.

A policy orders the blocks that nobody holds and that a prefix index still finds. All keep them in linked lists of runs of blocks
(`kv/rings.py`), and every operation costs O(1) a block, amortised, whatever the pool's size. Blocks of a higher priority go after
all those of a lower one. This module knows neither hashes, requests, clocks nor who holds a block. Invariants: a block is in
exactly one ring from `push` to `unlink` or `pop`; a prefix is pushed last block first, and so is reused from its tail inwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

from kvist.kv.density import Density
from kvist.kv.rings import ORDINARY_PRIORITY, Prioritized


class EvictionPolicy(Protocol):
    """Orders the free cached blocks of one pool."""

    @property
    def remembers(self) -> bool:
        """Whether it makes use of memos; without that `enter` need not be called."""

    def push(self, block_ids: Sequence[int]) -> None:
        """Nobody holds these cached blocks any more; of equals, the first given is reused first."""

    def unlink(self, block_ids: Sequence[int]) -> None:
        """These blocks were found, and are held again."""

    def pop(self, count: int) -> list[int]:
        """Take out the `count` blocks that are reused first; there are as many."""

    def order(self) -> list[int]:
        """All blocks in the order in which `pop` would take them (for tests and explanations; O(blocks))."""

    def hit(self, block_ids: Sequence[int]) -> None:
        """One more request holds each of these blocks."""

    def enter(self, block_ids: Sequence[int], memos: Sequence[int | None]) -> None:
        """Successive blocks of one sequence hold new content; a memo is what `leave` said of the same content when it was evicted,
        if that is remembered."""

    def leave(self, block_ids: Sequence[int]) -> Sequence[int]:
        """What to remember of contents that are evicted: of each a whole number below 2**`ghosts.MEMO_BITS`."""

    def set_priority(self, block_id: int, priority: int, *, linked: bool = False) -> None:
        """`linked`: the block is free, and takes its new place."""

    def drop(self, block_ids: Sequence[int]) -> None:
        """These free blocks hold nothing any more."""

    def succeed(self, block_id: int, other: int) -> None:
        """A held block holds what a free one of ordinary priority does, which is dropped for it."""


class Lru(Prioritized):
    """Least recently used first."""

    remembers = False

    def push(self, block_ids: Sequence[int]) -> None:
        if len(self._levels) == 1:
            self._rings.extend(self._level[ORDINARY_PRIORITY], block_ids)
            return
        for priority, alike in groupby(block_ids, self._priority.__getitem__):
            self._rings.extend(self._level[priority], list(alike))

    def pop(self, count: int) -> list[int]:
        taken: list[int] = []
        for priority in self._levels:
            count = self._rings.take(self._level[priority], count, taken)
            if not count:
                break
        assert not count, "there are as many blocks as are asked for"
        return taken

    def order(self) -> list[int]:
        return [block_id for priority in self._levels for block_id in self._rings.blocks(self._level[priority])]

    def hit(self, block_ids: Sequence[int]) -> None:
        pass

    def enter(self, block_ids: Sequence[int], memos: Sequence[int | None]) -> None:
        pass

    def leave(self, block_ids: Sequence[int]) -> Sequence[int]:
        return [0] * len(block_ids)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"density": Density, "lru": Lru}
"""By name, from the number of blocks; the first is the default."""
