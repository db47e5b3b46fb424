"""Linked lists over block ids, without an object per block, and the lists by priority that all eviction policies share.

This module knows neither hashes, requests nor which block is worth keeping. Invariant: a block is in at most one ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ORDINARY_PRIORITY = 50
MAX_PRIORITY = 100


class Rings:
    """Doubly linked lists over block ids. A ring is named by an entry of its own behind the blocks, which stands before its first
    block and after its last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.next = array("i", bytes(4 * num_blocks))
        self.prev = array("i", bytes(4 * num_blocks))
        self._unused: list[int] = []

    def open(self) -> int:
        """A new, empty ring."""
        if self._unused:
            return self._unused.pop()
        ring = len(self.next)
        self.next.append(ring)
        self.prev.append(ring)
        return ring

    def join(self, older: int, newer: int) -> None:
        """Put all of `newer` behind all of `older`; `newer` is closed."""
        following, previous = self.next, self.prev
        if following[newer] != newer:
            first, last, end = following[newer], previous[newer], previous[older]
            following[end], previous[first] = first, end
            following[last], previous[older] = older, last
        self.close(newer)

    def close(self, ring: int) -> None:
        """The ring's entry may be used again. Its blocks, if any, have gone elsewhere."""
        self.next[ring] = self.prev[ring] = ring
        self._unused.append(ring)

    def extend(self, ring: int, block_ids: Iterable[int]) -> None:
        """Put blocks behind all of the ring's."""
        following, previous = self.next, self.prev
        last = previous[ring]
        for block_id in block_ids:
            previous[block_id] = last
            following[last] = block_id
            last = block_id
        previous[ring] = last
        following[last] = ring

    def unlink(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of their rings. Those that follow each other as they stand there, in the opposite order, as the blocks of
        a prefix do, go as one piece."""
        following, previous = self.next, self.prev
        before = after = -1
        for block_id in block_ids:
            if block_id != before:
                if after >= 0:
                    following[before] = after
                    previous[after] = before
                after = following[block_id]
            before = previous[block_id]
        if after >= 0:
            following[before] = after
            previous[after] = before

    def take(self, ring: int, count: int, taken: list[int]) -> int:
        """Move up to `count` blocks from the ring's head to `taken`; returns how many are still wanted."""
        following = self.next
        block_id = following[ring]
        while count and block_id != ring:
            taken.append(block_id)
            block_id = following[block_id]
            count -= 1
        following[ring] = block_id
        self.prev[block_id] = ring
        return count

    def blocks(self, ring: int) -> list[int]:
        found = []
        block_id = self.next[ring]
        while block_id != ring:
            found.append(block_id)
            block_id = self.next[block_id]
        return found


class Prioritized:
    """What both policies share: one ring for each priority in use, and the priority of each block."""

    def __init__(self, num_blocks: int) -> None:
        self._rings = Rings(num_blocks)
        self._priority = bytearray([ORDINARY_PRIORITY]) * num_blocks
        self._level = {ORDINARY_PRIORITY: self._rings.open()}
        self._levels = [ORDINARY_PRIORITY]
        """The priorities in use, ascending."""

    def push(self, block_ids: Iterable[int]) -> None:
        raise NotImplementedError

    def set_priority(self, block_id: int, priority: int, *, linked: bool = False) -> None:
        """`linked`: the block is in a ring, and goes to the end of another."""
        assert 0 <= priority <= MAX_PRIORITY
        if linked:
            self._rings.unlink([block_id])
        if priority not in self._level:
            self._level[priority] = self._rings.open()
            self._levels = sorted(self._level)
        self._priority[block_id] = priority
        if linked:
            self.push([block_id])

    def drop(self, block_ids: Iterable[int]) -> None:
        self._rings.unlink(block_ids)

    def unlink(self, block_ids: Iterable[int]) -> None:
        self._rings.unlink(block_ids)
