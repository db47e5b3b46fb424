"""Who holds which block: reference counts and the free blocks of a pool of up to millions of block ids.

Bookkeeping is struct-of-arrays, no object per block, and every operation costs O(1) a block whatever the pool's size. A free
block whose content can still be found by the prefix index is *cached*, and an eviction policy says which of these is reused
first. A block that holds nothing of use is reused before all of them, the last one freed first, because that evicts nothing.
Reuse of cached blocks calls `on_evict` first. This module knows neither hashes, groups, requests nor bytes. Invariants: a block
is free exactly if its reference count is 0; it is then either in the policy's hands (cached) or on the stack of empty ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvist.kv.columns import all_are, gather
from kvist.kv.eviction import EvictionPolicy, Lru

FREE_CACHED, HELD, HELD_CACHED = 1, 2, 3
"""States of a block: nobody holds it, and its content can be found; one does, and its content cannot be found, or can."""


class BlockPool:
    """Block ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None], policy: EvictionPolicy | None = None) -> None:
        assert num_blocks > 0, "a pool has at least one block"
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.num_evictions = 0
        self.num_touched = 0
        """The first so many blocks have held something, as many as did at once at the most: those that were let go and hold nothing
        are taken before a new one."""
        self._on_evict = on_evict
        self._policy: EvictionPolicy = policy or Lru(num_blocks)
        self._states = [0] * num_blocks
        """Of each block twice its reference count, and 1 more if its content can be found."""
        self._empty = array("i")
        """Of those the free ones that hold nothing; reused from the end."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + self.num_blocks - self.num_touched + self.num_cached

    def ref_count(self, block_id: int) -> int:
        return self._states[block_id] >> 1

    def held_among(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Those of these blocks that are held, and how often."""
        states = gather(self._states, block_ids)
        if not states or max(states) < HELD:
            return []
        return [(block_id, state >> 1) for block_id, state in zip(block_ids, states, strict=True) if state >= HELD]

    def free_among(self, block_ids: Sequence[int]) -> list[int]:
        """The cached ones of these blocks that nobody holds."""
        states = gather(self._states, block_ids)
        if FREE_CACHED not in states:
            return []
        return [block_id for block_id, state in zip(block_ids, states, strict=True) if state == FREE_CACHED]

    def is_cached(self, block_id: int) -> bool:
        return self._states[block_id] & 1 == 1

    def free_queue(self) -> list[int]:
        """The free blocks in the order of their reuse (for tests and explanations; O(free blocks))."""
        return [*reversed(self._empty), *range(self.num_touched, self.num_blocks), *self._policy.order()]

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, each now held once; cached ones among them are evicted. None when there are fewer."""
        empty, states, taken = self._empty, self._states, []
        if count > self.num_free:
            return None
        if empty:
            start = max(0, len(empty) - count)
            taken = empty[start:].tolist()
            taken.reverse()
            del empty[start:]
        if len(taken) < count and self.num_touched < self.num_blocks:
            start = self.num_touched
            self.num_touched = min(self.num_blocks, start + count - len(taken))
            taken += range(start, self.num_touched)
        if (missing := count - len(taken)) > 0:
            evicted = self._policy.pop(missing)
            self.num_cached -= missing
            self.num_evictions += missing
            self._on_evict(evicted)
            taken += evicted
        for block_id in taken:
            states[block_id] = HELD
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold each of these different blocks once more, to use it. Free blocks must be cached ones: others have no content to
        share."""
        self.keep(block_ids)
        if block_ids:
            self._policy.hit(block_ids)

    def keep(self, block_ids: Sequence[int]) -> None:
        """The same of blocks that are not used, only not to be lost."""
        states = self._states
        if block_ids and all_are(gather(states, block_ids), FREE_CACHED):
            free = block_ids
            for block_id in block_ids:
                states[block_id] = HELD_CACHED
        else:
            free = []
            for block_id in block_ids:
                state = states[block_id]
                if state < 2:
                    assert state, f"block {block_id} is free and holds nothing"
                    free.append(block_id)
                states[block_id] = state + 2
        if free:
            self.num_cached -= len(free)
            self._policy.unlink(free)

    def release(self, block_ids: Sequence[int]) -> int:
        """Hold each block once less; of the cached blocks, the first given is the first reused. Returns how many became free."""
        states, empty, num_empty = self._states, self._empty, 0
        # A request's last block is mostly not full.
        while num_empty < len(block_ids) and states[block_id := block_ids[num_empty]] == HELD:
            states[block_id] = 0
            empty.append(block_id)
            num_empty += 1
        let_go = block_ids[num_empty:] if num_empty else block_ids
        if let_go and all_are(gather(states, let_go), HELD_CACHED):
            for block_id in let_go:
                states[block_id] = FREE_CACHED
        elif let_go:
            let_go, num_others = self._release_any(let_go)
            num_empty += num_others
        if let_go:
            self._policy.push(let_go)
            self.num_cached += len(let_go)
        return len(let_go) + num_empty

    def _release_any(self, block_ids: Sequence[int]) -> tuple[list[int], int]:
        """Those that are free and cached now, and how many others are free."""
        states, empty, before, let_go = self._states, self._empty, len(self._empty), list[int]()
        for block_id in block_ids:
            left = states[block_id] - 2
            if left == FREE_CACHED:
                let_go.append(block_id)
            elif left < FREE_CACHED:
                assert left == 0, f"block {block_id} is released more often than held"
                empty.append(block_id)
            states[block_id] = left
        return let_go, len(empty) - before

    def mark_cached(self, block_ids: Sequence[int]) -> None:
        """The content of these held blocks can be found from now on."""
        states = self._states
        if block_ids and all_are(gather(states, block_ids), HELD):
            for block_id in block_ids:
                states[block_id] = HELD_CACHED
        else:
            for block_id in block_ids:
                state = states[block_id]
                assert state >= HELD, f"block {block_id} is held by nobody, so nobody computed it"
                states[block_id] = state | 1

    def set_priority(self, block_id: int, priority: int) -> None:
        """Of a cached block, held or free."""
        state = self._states[block_id]
        assert state & 1, f"block {block_id} holds nothing to keep"
        self._policy.set_priority(block_id, priority, linked=state == 1)

    def drop(self, block_ids: Sequence[int]) -> None:
        """What these free cached blocks hold is of no use any more."""
        self._policy.drop(block_ids)
        for block_id in block_ids:
            assert self._states[block_id] == 1
            self._states[block_id] = 0
        self.num_cached -= len(block_ids)
        self._empty.extend(block_ids)

    def succeed(self, block_id: int, other: int) -> None:
        """A held block has the content of a free cached one, which holds nothing from now on."""
        states = self._states
        assert states[block_id] >= HELD
        assert states[other] == FREE_CACHED
        self._policy.succeed(block_id, other)
        states[block_id] |= 1
        states[other] = 0
        self.num_cached -= 1
        self._empty.append(other)

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        order = self.free_queue()
        assert len(order) == self.num_free == len(set(order))
        assert all(self._states[block_id] < 2 for block_id in order)
        assert self.num_free == sum(state < 2 for state in self._states)
        assert min(self._states) >= 0
        assert self.num_cached == sum(self._states[block_id] for block_id in order)
        assert not any(self._states[block_id] for block_id in self._empty)
        assert not any(self._states[self.num_touched :])
