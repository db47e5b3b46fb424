"""Who holds which block: reference counts and the free queue of a pool of up to millions of block ids.

Bookkeeping is struct-of-arrays, no object per block, and every operation costs O(1) a block whatever the pool's size. The free
queue is a doubly linked list over the ids; its head is reused next. A block whose content can still be found by the prefix index is
*cached* and waits at the tail (least recently used first); a block that holds nothing of use goes to the head, because reusing it
evicts nothing. Reuse of a cached block calls `on_evict` first. This module knows neither hashes, groups, requests nor bytes.
Invariants: a block is in the free queue exactly if its reference count is 0; `num_cached` counts the free blocks that are cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable


class BlockPool:
    """Block ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        assert num_blocks > 0, "a pool has at least one block"
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_evictions = 0
        self._on_evict = on_evict
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._cached = bytearray(num_blocks)
        # The queue is a ring through one extra entry at index `num_blocks`, which stands before the head and after the tail.
        self._next = array("i", range(1, num_blocks + 1))
        self._next.append(0)
        self._prev = array("i", [num_blocks])
        self._prev.extend(range(num_blocks))

    def ref_count(self, block_id: int) -> int:
        return self._ref_count[block_id]

    def is_cached(self, block_id: int) -> bool:
        return bool(self._cached[block_id])

    def free_queue(self) -> list[int]:
        """The free blocks in the order of their reuse (for tests and explanations; O(free blocks))."""
        order = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            order.append(block_id)
            block_id = self._next[block_id]
        return order

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, each now held once; cached ones among them are evicted. None when there are fewer."""
        if count > self.num_free:
            return None
        following, refs, cached = self._next, self._ref_count, self._cached
        taken = []
        block_id = following[self.num_blocks]
        for _ in range(count):
            taken.append(block_id)
            refs[block_id] = 1
            if cached[block_id]:
                cached[block_id] = 0
                self.num_cached -= 1
                self.num_evictions += 1
                self._on_evict(block_id)
            block_id = following[block_id]
        following[self.num_blocks] = block_id
        self._prev[block_id] = self.num_blocks
        self.num_free -= count
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold each block once more. Free blocks must be cached ones: others have no content to share."""
        following, previous, refs = self._next, self._prev, self._ref_count
        for block_id in block_ids:
            if refs[block_id] == 0:
                assert self._cached[block_id], f"block {block_id} is free and holds nothing"
                before, after = previous[block_id], following[block_id]
                following[before] = after
                previous[after] = before
                self.num_free -= 1
                self.num_cached -= 1
            refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> int:
        """Hold each block once less; of the cached blocks, the first given is the first reused. Returns how many became free."""
        following, previous, refs, cached = self._next, self._prev, self._ref_count, self._cached
        ring = self.num_blocks
        freed = 0
        for block_id in block_ids:
            left = refs[block_id] - 1
            assert left >= 0, f"block {block_id} is released more often than held"
            refs[block_id] = left
            if left:
                continue
            freed += 1
            if cached[block_id]:
                self.num_cached += 1
                before, after = previous[ring], ring
            else:
                before, after = ring, following[ring]
            previous[block_id] = before
            following[block_id] = after
            following[before] = block_id
            previous[after] = block_id
        self.num_free += freed
        return freed

    def mark_cached(self, block_id: int) -> None:
        """The content of a held block can be found from now on."""
        assert self._ref_count[block_id] > 0, f"block {block_id} is held by nobody, so nobody computed it"
        self._cached[block_id] = 1

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        order = self.free_queue()
        assert len(order) == self.num_free == len(set(order))
        assert all(self._ref_count[block_id] == 0 for block_id in order)
        assert self.num_free == self._ref_count.count(0)
        assert min(self._ref_count) >= 0
        assert self.num_cached == sum(self._cached[block_id] for block_id in order)
        assert all(self._prev[self._next[block_id]] == block_id for block_id in [*order, self.num_blocks])
