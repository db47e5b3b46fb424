"""Eviction policies: exact orders, what `density` learns, and a state machine over both against a set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.deciders import make_request, make_spec
from kvist.bench.eviction import conversations
from kvist.config import EVICTION_POLICIES
from kvist.kv.density import AGE_CELLS, CELL_WIDTHS, Density, ReuseStatistics, age_cell
from kvist.kv.eviction import POLICIES, EvictionPolicy, Lru
from kvist.kv.ghosts import MEMO_BITS
from kvist.kv.manager import KVManager
from kvist.kv.rings import MAX_JOINED, Rings

POLICY_NAMES = sorted(POLICIES)


def test_the_options_name_the_policies() -> None:
    assert set(EVICTION_POLICIES) == set(POLICIES)


def test_lru_reuses_the_least_recently_used_and_lower_priorities_first() -> None:
    policy = Lru(8)
    policy.push([3, 1, 2])
    policy.set_priority(5, 10)
    policy.set_priority(6, 90)
    policy.push([6, 5, 0])
    assert policy.order() == [5, 3, 1, 2, 0, 6]
    policy.unlink([1])
    policy.push([1])
    assert policy.pop(4) == [5, 3, 2, 0]
    assert policy.pop(2) == [1, 6]
    assert policy.order() == []


def test_rings_join_and_close() -> None:
    rings = Rings(6)
    old, new, none = rings.open(), rings.open(), rings.open()
    for ring, block in ((old, 0), (new, 1), (old, 2), (new, 3)):
        rings.extend(ring, [block])
    assert [run.left for run in (old.after, new.after)] == [2, 2], "single blocks share a run"
    rings.join(old, none)
    rings.join(old, new)
    assert rings.blocks(old) == [0, 2, 1, 3]
    assert [count for _, count in rings.unlink([1])] == [1]
    taken: list[int] = []
    assert rings.take(old, 2, taken) == 0
    assert (taken, rings.blocks(old)) == ([0, 2], [3])
    assert rings.take(old, 2, taken) == 1
    assert (taken, old.after) == ([0, 2, 3], old)
    rings.close(old)


def test_a_block_that_went_and_came_back_is_not_found_where_it_was() -> None:
    rings = Rings(9)
    ring = rings.open()
    rings.extend(ring, [0, 1, 2, 3, 4])
    rings.unlink([1])
    rings.extend(ring, [5, 1])
    assert rings.blocks(ring) == [0, 2, 3, 4, 5, 1]
    rings.unlink([0, 3, 4])
    rings.extend(ring, [3])
    taken: list[int] = []
    assert rings.take(ring, 3, taken) == 0
    assert (taken, rings.blocks(ring)) == ([2, 5, 1], [3])


def test_many_runs_of_stale_entries_are_forgotten() -> None:
    """A prompt that is asked again and again leaves no trace of the times before."""
    rings = Rings(100)
    ring = rings.open()
    rings.extend(ring, [99])
    for _ in range(1000):
        rings.extend(ring, list(range(90)))
        rings.unlink(list(range(60)))
        rings.unlink(list(range(60, 90)))
    rings.extend(ring, list(range(70)))
    rings.unlink(list(range(0, 70, 2)))
    assert ring.after is ring.before, "a short run is made longer"
    assert len(ring.after.block_ids) == 71
    rings.unlink([1])
    assert ring.after.block_ids.tolist() == [99, *range(3, 70, 2)], "what is half stale is written anew"


@pytest.mark.parametrize("shared", [1, 40, 64])
def test_blocks_let_go_with_others_that_come_and_go_cost_no_run_each(shared: int) -> None:
    """Prompts with one block of their own, which is let go first, behind blocks that all of them hold in turn."""
    rings, common = Rings(400), list(range(shared))
    ring = rings.open()
    for own in range(100, 300):
        rings.extend(ring, [own, *common])
        rings.unlink(common)
    assert rings.blocks(ring) == list(range(100, 300))
    runs, run = 0, ring.after
    while run is not ring:
        runs, run = runs + 1, run.after
    assert runs == -(-200 // MAX_JOINED)
    taken: list[int] = []
    assert rings.take(ring, 150, taken) == 0
    assert taken == list(range(100, 250))


@given(st.data())
def test_pieces_of_rings_are_taken_out_in_any_order(data: st.DataObject) -> None:
    rings = Rings(12, 2)
    rows = [data.draw(st.permutations(range(7))), data.draw(st.permutations(range(7, 12)))]
    names = [rings.open(), rings.open()]
    for kind, (ring, row) in enumerate(zip(names, rows, strict=True)):
        rings.extend(ring, row[:3], kind, 1)
        rings.extend(ring, row[3:], kind, data.draw(st.integers(1, 2)))
    backwards = [block for row in rows for block in reversed(row)]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    taken = data.draw(
        st.sampled_from([backwards[start:stop], backwards[start:stop][::-1], data.draw(st.permutations(backwards))[:stop]])
    )
    found = rings.unlink(taken)
    assert [run.kind for run, count in found for _ in range(count)] == [block >= 7 for block in taken]
    assert [run.kind for run in rings.runs_of(taken)] == [block >= 7 for block in taken], "its kind stays with a block"
    for ring, row in zip(names, rows, strict=True):
        left = [block for block in row if block not in taken]
        assert rings.blocks(ring) == left
        assert rings.take(ring, 2, popped := []) == max(0, 2 - len(left))
        assert (popped, rings.blocks(ring)) == (left[:2], left[2:])


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_prefix_is_reused_from_its_tail(name: str) -> None:
    policy = POLICIES[name](64)
    policy.enter(list(range(10)), [None] * 10 if policy.remembers else [])
    policy.push(list(range(9, -1, -1)))
    assert policy.pop(3) == [9, 8, 7]
    policy.unlink([0, 1])
    policy.hit([0, 1])
    policy.push([1, 0])
    assert policy.pop(7) == [6, 5, 4, 3, 2, 1, 0]


def test_ages_fall_into_two_cells_a_doubling() -> None:
    assert [age_cell(age) for age in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16)] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]
    assert age_cell(1 << 40) == AGE_CELLS - 1
    assert CELL_WIDTHS[:8] == (1, 1, 1, 1, 2, 2, 4, 4)
    assert sum(CELL_WIDTHS) == 2**14


def test_without_lessons_more_used_and_younger_content_is_worth_more() -> None:
    worth = ReuseStatistics().worth
    for row, more in itertools.pairwise(worth):
        assert all(row[cell] > row[cell + 1] for cell in range(AGE_CELLS - 1))
        assert all(a < b for a, b in zip(row, more, strict=True))


def test_content_that_returns_late_is_worth_most_shortly_before() -> None:
    statistics = ReuseStatistics()
    statistics.kept[0] = 10_000.0
    statistics.returned[0][10] = 9_000.0
    statistics.learn()
    row = statistics.worth[0]
    assert max(row) == row[10]
    assert all(row[cell] < row[cell + 1] for cell in range(10))
    assert row[11] < row[0] / 10, "what did not come then is not expected any more"


def test_content_that_was_used_more_is_worth_no_less_at_any_age() -> None:
    """What is known of it may say so, but whoever uses content behind it uses it too."""
    statistics = ReuseStatistics()
    statistics.kept = [10_000.0, 0.0, 10_000.0, *[0.0] * 3]
    statistics.returned[0][10] = 9_000.0
    statistics.learn()
    for row, more in itertools.pairwise(statistics.worth):
        assert all(a <= b for a, b in zip(row, more, strict=True))
    assert statistics.worth[2][10] == statistics.worth[0][10], "by itself next to nothing"


def test_a_prefix_stays_as_long_as_what_follows_it() -> None:
    """On this made-up trace always; where ages differ much the order may be another."""
    manager, evictions = KVManager(make_spec(block_size=1), 100, watermark=0.0), 0
    for number, prompt in enumerate(conversations(40)):
        request = make_request(f"{number}", prompt.blocks)
        if request.num_tokens > 100:
            continue
        manager.add(request)
        manager.attach(request, match := manager.match(request))
        request.num_computed_tokens = match.num_tokens
        assert manager.allocate(request, request.num_tokens - match.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
        manager.free(request)
        stretches = [stretch for stretch in manager.index.stretches_of(0, 100) if stretch is not None]
        names = {stretch.name(offset) for stretch in stretches for offset in range(stretch.num_blocks)}
        assert all(stretch.parent in {*names, stretch.root} for stretch in stretches)
        evictions = manager.usage().evictions
    assert evictions > 500


def test_density_keeps_used_content_from_a_stream_of_new() -> None:
    """The same two blocks are used every now and then among ever new ones; LRU loses them each time, and `density` does not."""
    found = {}
    for name in POLICY_NAMES:
        policy, hits, cached, memos = POLICIES[name](64), 0, [], {}
        empty = list(range(63, -1, -1))
        where: dict[int, int] = {}
        names: dict[int, int] = {}
        new = iter(range(100, 10**6))
        for turn in range(3000):
            content = turn % 2 if turn % 90 < 2 else next(new)
            if content in where:
                block = where[content]
                policy.unlink([block])
                policy.hit([block])
                hits += 1
            else:
                if not empty:
                    (block,) = policy.pop(1)
                    (memos[names[block]],) = policy.leave([block])
                    del where[names[block]]
                    empty.append(block)
                block = empty.pop()
                policy.enter([block], [memos.get(content)] if policy.remembers else [])
                where[content], names[block] = block, content
            policy.push([block])
        cached.append(len(where))
        assert cached == [64]
        found[name] = hits
    assert found["lru"] == 0
    assert found["density"] > 50


class PolicyMachine(RuleBasedStateMachine):
    """What is in and out is always exact, the announced order is kept, and priorities hold."""

    policy: EvictionPolicy

    @initialize(name=st.sampled_from(POLICY_NAMES), size=st.sampled_from([20, 300]))
    def start(self, name: str, size: int) -> None:
        self.size = size
        self.policy = POLICIES[name](size)
        self.inside: set[int] = set()
        self.priority = [50] * size
        self.memos: dict[int, int] = {}

    @precondition(lambda self: len(self.inside) < self.size)
    @rule(data=st.data(), known=st.booleans(), priority=st.sampled_from([None, None, 0, 50, 80]))
    def push(self, data: st.DataObject, known: bool, priority: int | None) -> None:
        outside = [block for block in range(self.size) if block not in self.inside]
        start = data.draw(st.integers(0, len(outside) - 1))
        blocks = outside[start : start + data.draw(st.integers(1, 30))]
        if priority is not None:
            for block in blocks:
                self.policy.set_priority(block, priority)
                self.priority[block] = priority
        if self.policy.remembers:
            self.policy.enter(blocks, [self.memos.get(block) if known else None for block in blocks])
        else:
            self.policy.enter(blocks, [])
        self.policy.push(blocks[::-1])
        self.inside.update(blocks)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.inside)), unique=True, max_size=10))
        self.policy.unlink(blocks)
        self.policy.hit(blocks)
        self.inside.difference_update(blocks)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        expected = self.policy.order()
        count = data.draw(st.integers(0, len(self.inside)))
        taken = self.policy.pop(count)
        assert taken == expected[:count]
        self.memos.update(zip(taken, self.policy.leave(taken), strict=True))
        assert all(0 <= memo < 2**MEMO_BITS for memo in self.memos.values())
        self.inside.difference_update(taken)

    @invariant()
    def same(self) -> None:
        order = self.policy.order()
        assert len(order) == len(self.inside)
        assert set(order) == self.inside
        levels = [self.priority[block] for block in order]
        assert levels == sorted(levels)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_density_forgets_old_habits_and_keeps_its_rings_few() -> None:
    policy = Density(256)
    for start in range(0, 256 * 1200, 4):
        blocks = [(start + offset) % 256 for offset in range(4)]
        if start >= 256:
            assert policy.pop(4) == blocks, "content used once goes in the order of its use"
        policy.enter(blocks, [None] * 4)
        policy.push(blocks)
    assert sum(map(len, policy._old)) < 200
    assert sum(policy._statistics.kept) < 2 * 256 * 256
