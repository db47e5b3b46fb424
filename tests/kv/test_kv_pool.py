"""The block pool: exact ids and orders, and a state machine against a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.kv.density import Density
from kvist.kv.pool import BlockPool


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.extend), evicted


def test_a_new_pool_hands_out_ids_in_order() -> None:
    pool, evicted = make_pool(5)
    assert pool.take(2) == [0, 1]
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert pool.take(3) == [2, 3, 4]
    assert pool.take(1) is None
    assert pool.take(0) == []
    assert (pool.num_free, pool.num_cached, evicted) == (0, 0, [])
    pool.check_invariants()


def test_blocks_of_no_use_are_reused_first_and_cached_ones_oldest_first() -> None:
    pool, evicted = make_pool(6)
    pool.take(6)
    pool.mark_cached([1, 2, 4])
    assert pool.release([2, 0, 4, 3, 1, 5]) == 6
    assert pool.free_queue() == [5, 3, 0, 2, 4, 1]
    assert pool.num_cached == 3
    assert pool.take(4) == [5, 3, 0, 2]
    assert evicted == [2]
    assert not pool.is_cached(2)
    assert (pool.num_cached, pool.num_evictions) == (2, 1)
    pool.check_invariants()


def test_sharing_takes_a_cached_block_out_of_the_queue_and_its_return_makes_it_youngest() -> None:
    pool, evicted = make_pool(3)
    pool.take(3)
    pool.mark_cached(range(3))
    pool.release([0, 1, 2])
    pool.share([1, 0])
    pool.share([1])
    assert [pool.ref_count(block_id) for block_id in range(3)] == [1, 2, 0]
    assert pool.free_queue() == [2]
    assert pool.release([1, 0]) == 1
    assert pool.free_queue() == [2, 0]
    assert pool.release([1]) == 1
    assert pool.free_queue() == [2, 0, 1]
    assert evicted == []
    pool.check_invariants()


def test_a_block_takes_the_place_of_another_of_its_content_and_its_class() -> None:
    policy = Density(4)
    pool = BlockPool(4, lambda block_ids: None, policy)
    assert pool.take(2) == [0, 1]
    pool.mark_cached([0])
    for _ in range(2):
        pool.release([0])
        pool.share([0])
    pool.release([0])
    assert (pool.num_cached, pool.num_free) == (1, 3)
    pool.succeed(1, 0)
    pool.check_invariants()
    assert (pool.ref_count(0), pool.is_cached(0), pool.ref_count(1), pool.is_cached(1)) == (0, False, 1, True)
    assert (pool.num_cached, pool.num_free) == (0, 3)
    assert pool.take(1) == [0], "which holds nothing now"
    pool.release([1])
    assert [memo & 7 for memo in policy.leave([1])] == [2], "found twice"


def test_what_is_found_while_another_holds_it_counts_as_used_again() -> None:
    """What many asked for at once is worth no less than what they ask for one after the other."""
    pool = BlockPool(4, lambda block_ids: None, Density(4))
    assert pool.take(2) == [0, 1]
    pool.mark_cached([0, 1])
    pool.share([0])
    assert pool.release([0, 0, 1]) == 2
    assert pool.free_queue() == [2, 3, 1, 0], "the older one stays longer"


def test_misuse_asserts() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release([0])
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.share([0])
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.mark_cached([0])


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(8, self.evicted.extend)
        self.refs = [0] * 8
        self.queue = list(range(8))
        self.cached: set[int] = set()
        self.expected_evictions: list[int] = []

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        taken = self.pool.take(count)
        if count > len(self.queue):
            assert taken is None
            return
        assert taken == self.queue[:count]
        self.queue = self.queue[count:]
        for block_id in taken:
            self.refs[block_id] = 1
            if block_id in self.cached:
                self.cached.remove(block_id)
                self.expected_evictions.append(block_id)

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([block for block in range(8) if self.refs[block]]))
        self.pool.mark_cached([block_id])
        self.cached.add(block_id)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        usable = [block for block in range(8) if self.refs[block] or block in self.cached]
        chosen = data.draw(st.lists(st.sampled_from(usable), max_size=4, unique=True)) if usable else []
        self.pool.share(chosen)
        for block_id in chosen:
            if self.refs[block_id] == 0:
                self.queue.remove(block_id)
            self.refs[block_id] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [block for block in range(8) for _ in range(self.refs[block])]
        chosen = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
        freed = 0
        for block_id in chosen:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                freed += 1
                self.queue.insert(len(self.queue) if block_id in self.cached else 0, block_id)
        assert self.pool.release(chosen) == freed

    @invariant()
    def same(self) -> None:
        self.pool.check_invariants()
        assert self.pool.free_queue() == self.queue
        assert [self.pool.ref_count(block_id) for block_id in range(8)] == self.refs
        assert {block_id for block_id in range(8) if self.pool.is_cached(block_id)} == self.cached
        assert self.evicted == self.expected_evictions
        assert self.pool.num_evictions == len(self.evicted)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
