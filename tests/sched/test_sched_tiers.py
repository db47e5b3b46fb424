"""A tier behind the pool: restarts hit, swap instead of computing, nobody starves, and no row ever reads what a fill has left."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from test_sched_machine import SchedulerMachine, alone

from helpers.deciders_tier import TieredSim
from kvist.kv.hints import KVHints
from kvist.kv.origins import tokens_of
from kvist.kv.tiers import MAX_FOLLOWERS, parse_name
from kvist.kv.walks import finish, flush
from kvist.request import Request, RequestStatus
from kvist.sched.prefetch import MAX_PLANS


def restarted(old: TieredSim, **options: object) -> TieredSim:
    """An engine with an empty pool and the old one's disk."""
    new = TieredSim(num_blocks=old.manager.num_blocks, block_size=old.spec.block_size, **options)  # type: ignore[arg-type]
    new.restart_from(old)
    return new


def test_a_restart_hits_and_says_so() -> None:
    sim = TieredSim(num_blocks=20, block_size=4)
    first = sim.generate("first", range(30), 3)
    assert len(sim.disk) == 8
    new = restarted(sim, latency=3)
    again = new.generate("again", range(30), 3)
    assert again.output_token_ids == first.output_token_ids
    # Seven whole blocks, and the first token of the eighth.
    assert (again.num_cached_tokens, again.num_disk_tokens) == (29, 29)
    assert new.num_filled == 8
    assert new.num_waits > 0, "it waited for the disk"
    third = new.generate("third", range(30), 3)
    assert (third.num_cached_tokens, third.num_disk_tokens) == (29, 0), "now it is on the device"
    stats = new.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_disk_tokens) == (60, 58, 29)


def test_salts_do_not_share_a_disk() -> None:
    sim = TieredSim(num_blocks=20, block_size=4)
    sim.generate("first", range(30), 1, salt="a")
    new = restarted(sim)
    assert new.generate("other", range(30), 1, salt="b").num_cached_tokens == 0
    assert new.generate("same", range(30), 1, salt="a").num_disk_tokens == 29


@pytest.mark.parametrize("windows", [(None,), (None, 6, 6), (6,)])
@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (range(23), 22),
        ([*range(23), 90, 91], 23),
        ([*range(22), 90, 91], 22),
        ([*range(21), 90, 91], 21),
        ([*range(20), 90, 91], 20),
        ([90, 91], 0),
        ([0, 1, 2], 2),
    ],
)
def test_the_last_block_of_who_has_ended_comes_back_as_far_as_it_begins_alike(
    windows: tuple[int | None, ...], prompt: Sequence[int], found: int
) -> None:
    """23 tokens were computed, 3 of them in the last block. A block is read for half of it, with the next
    token, which is computed."""
    sim = TieredSim(*windows, num_blocks=60, block_size=4)
    sim.generate("first", range(23), 1)
    new = TieredSim(*windows, num_blocks=60, block_size=4)
    new.restart_from(sim)
    request = new.generate("again", prompt, 3)
    assert (request.num_cached_tokens, request.num_disk_tokens) == (found, found)
    assert request.output_token_ids == alone(request, windows)
    new.scheduler.check_invariants()
    once_more = new.generate("more", prompt, 3)
    assert (once_more.num_cached_tokens, once_more.num_disk_tokens) == (len(prompt) - 1, 0)


@pytest.mark.parametrize("windows", [(None,), (None, 6, 6)])
def test_short_questions_behind_one_prompt_are_all_found_again(windows: tuple[int | None, ...]) -> None:
    """As many as are looked at, and the oldest is one too many."""
    sim = TieredSim(*windows, num_blocks=200, block_size=4)
    asks = [[*range(8), 100 + number, 1, 2] for number in range(MAX_FOLLOWERS + 1)]
    for number, ask in enumerate(asks):
        sim.generate(f"first{number}", ask, 1)
    new = TieredSim(*windows, num_blocks=200, block_size=4)
    new.restart_from(sim)
    new.scheduler.check_invariants()
    requests = [new.generate(f"again{number}", ask, 1) for number, ask in enumerate(asks)]
    assert [request.num_disk_tokens for request in requests] == [8, *[2] * MAX_FOLLOWERS]
    assert [request.num_cached_tokens for request in requests] == [8, *[10] * MAX_FOLLOWERS]


def test_a_last_block_that_is_damaged_costs_nothing_else() -> None:
    sim = TieredSim(num_blocks=60, block_size=4)
    sim.generate("first", range(23), 1)
    new = TieredSim(num_blocks=60, block_size=4)
    new.restart_from(sim)
    (tail,) = (name for name, about in new.about.items() if len(tokens_of(about)) == 3)
    del new.disk[tail]
    request = new.generate("again", range(23), 3)
    assert (request.num_cached_tokens, request.num_disk_tokens, new.num_failed) == (20, 20, 1)
    assert request.output_token_ids == alone(request, (None,))


def test_two_that_wait_for_one_prefix_read_it_once() -> None:
    sim = TieredSim(num_blocks=40, block_size=4)
    sim.generate("first", range(30), 1)
    new = restarted(sim, latency=4)
    one, two = (new.add(name, [*range(29), number], 2) for number, name in enumerate(["one", "two"]))
    new.run()
    assert new.num_filled == 8
    assert (one.num_disk_tokens, two.num_cached_tokens, two.num_disk_tokens) == (29, 29, 0)


def test_who_comes_after_one_that_ended_waits_for_its_plan() -> None:
    """The plan goes on without who asked for it; the tokens that it brings are not counted as another's."""
    sim = TieredSim(num_blocks=40, block_size=4)
    sim.generate("first", range(30), 1)
    new = restarted(sim, latency=6)
    new.add("gone", range(30), 1)
    new.step()
    assert new.prefetcher.num_restoring == 1
    new.end("gone")
    request = new.generate("next", range(30), 1)
    assert (request.num_cached_tokens, request.num_disk_tokens, new.num_filled) == (29, 0, 8)
    assert new.num_waits > 0


def test_one_that_is_alone_may_have_the_reserve_filled() -> None:
    sim = TieredSim(num_blocks=20, block_size=4)
    sim.generate("first", range(61), 1)
    new = restarted(sim, watermark=0.3)
    assert new.manager.watermark_blocks == 6
    assert new.generate("again", range(61), 1).num_disk_tokens == 60


def test_a_block_of_a_window_that_is_damaged_costs_what_it_must() -> None:
    """The hit of 28 tokens needs the last blocks of the windowed group. Where one does not come, one of 24 needs others."""
    sim = TieredSim(None, 4, num_blocks=60, block_size=4)
    sim.generate("first", range(29), 1)
    new = TieredSim(None, 4, num_blocks=60, block_size=4)
    new.restart_from(sim)
    windowed = [name for name in new.disk if parse_name(name)[0] == 1]
    del new.disk[windowed[-1]]
    request = new.generate("again", range(29), 1)
    assert (request.num_cached_tokens, new.num_failed) == (24, 1)


def test_a_slow_disk_is_waited_for_as_long_as_computing_takes() -> None:
    sim = TieredSim(num_blocks=40, block_size=4)
    sim.generate("first", range(30), 1)
    new = restarted(sim)
    new.set_rates(10**9, 7)
    new.latency = 10**6
    new.rng = random.Random(3)
    request = new.add("late", range(30), 2)
    for _ in range(6):
        new.step()
    # 29 tokens at 7 a second, and a step is a second here.
    assert [output.empty for output in new.outputs] == [True] * 5 + [False]
    assert request.num_cached_tokens == 0
    new.run()
    assert new.num_filled == 8, "the plan goes on, and its blocks are given back"
    assert new.manager.num_free_blocks == 40
    new.scheduler.check_invariants()


def test_late_restores_that_hold_all_free_blocks_are_stopped() -> None:
    """The first in the queue has given up its own late plan, finds a pinned block, and has not one block to go on with."""
    sim = TieredSim(num_blocks=24, block_size=4)
    sim.generate("one", range(30), 1)
    sim.generate("two", range(50, 80), 1)
    new = TieredSim(num_blocks=13, block_size=4)
    new.restart_from(sim)
    new.generate("pin", range(5), 1, kv=KVHints(pin=True))
    new.set_rates(10**9, 7)
    new.latency = 10**6
    late, other = new.add("late", range(30), 2), new.add("other", range(50, 71), 2)
    # 25 tokens at 7 a second, a step is a second here, and what is stopped is known in the step after.
    for _ in range(5):
        assert new.step().empty
        assert (new.manager.num_pinned_blocks, new.manager.num_free_blocks) == (1, 0)
        new.scheduler.check_invariants()
    assert [item.request_id for item in new.step().scheduled] == ["late"]
    assert new.num_stopped == 2
    assert late.num_cached_tokens < 29
    new.run()
    for request in (late, other):
        assert request.output_token_ids == alone(request, (None,))


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_is_hit_on_the_device_stays_in_the_tier(windows: tuple[int | None, ...], renews: bool) -> None:
    """A prompt that is asked again and again is not read from the tier, which lets go of it as the oldest: it is written again."""
    sim = TieredSim(*windows, num_blocks=60, block_size=4)
    sim.tier.renews = renews
    sim.generate("first", range(30), 1)
    written = dict(sim.disk)
    sim.tier.lost(list(sim.disk))
    sim.disk.clear()
    assert sim.generate("again", range(30), 1).num_cached_tokens == 29
    # The last blocks, which are not full, are offered in any case.
    assert (len(sim.disk) > len(windows)) == renews
    assert all(written.get(name, slots) == slots for name, slots in sim.disk.items())
    new = TieredSim(*windows, num_blocks=60, block_size=4)
    new.restart_from(sim)
    request = new.generate("restarted", range(30), 1)
    assert request.num_disk_tokens >= (28 if renews else 0)
    assert request.output_token_ids == alone(request, windows)


def test_computing_is_chosen_where_it_is_cheaper() -> None:
    sim = TieredSim(num_blocks=40, block_size=4)
    sim.generate("first", range(30), 1)
    new = restarted(sim)
    new.set_rates(1, 10**6)
    assert new.generate("again", range(30), 1).num_cached_tokens == 0
    assert new.num_filled == 0
    assert new.tier.num_refused == 1


@pytest.mark.parametrize(("read", "tokens", "kind"), [(10**12, 1, "swap"), (1, 10**6, "recompute"), (None, None, "swap")])
def test_preemption_takes_the_cheaper_way_and_leaves_a_record(read: int | None, tokens: int | None, kind: str) -> None:
    sim = TieredSim(num_blocks=8, block_size=4, max_num_batched_tokens=16)
    sim.set_rates(read, tokens)
    old, new = sim.add("old", range(12), 16), sim.add("new", range(50, 58), 16)
    sim.run()
    for request in (old, new):
        assert request.output_token_ids == alone(request, (None,))
    records = sim.scheduler.preemptions()
    assert records
    assert new.num_preemptions == len(records)
    for record in records:
        assert (record.request_id, record.cause_request_id, record.kind) == ("new", "old", kind)
        assert record.stall is not None
        assert record.stall > 0
        assert 0 < record.num_tokens_found <= record.num_tokens or kind == "recompute"
    assert sim.scheduler.stats().num_swaps == (len(records) if kind == "swap" else 0)
    assert (sim.num_filled > 0) == (kind == "swap")


def test_a_tier_that_takes_no_blocks_is_read_and_nobody_is_swapped_to_it() -> None:
    sim = TieredSim(num_blocks=8, block_size=4, max_num_batched_tokens=16)
    sim.generate("first", range(12), 1)
    new = restarted(sim)
    new.set_rates(10**12, 1)
    new.tier.takes_blocks = False
    again, other = new.add("again", range(12), 16), new.add("other", range(50, 58), 16)
    new.run()
    assert again.num_cached_tokens == 11
    for request in (again, other):
        assert request.output_token_ids == alone(request, (None,))
    records = new.scheduler.preemptions()
    assert {record.kind for record in records} == {"recompute"}
    assert new.scheduler.stats().num_swaps == 0
    assert new.disk.keys() == sim.disk.keys()
    assert not new.staged


def reads_late(sim: TieredSim) -> None:
    sim.latency = 50


def computes_quicker(sim: TieredSim) -> None:
    sim.set_rates(1, 10**6)


def loses_all(sim: TieredSim) -> None:
    sim.tier.lost(list(sim.disk))
    sim.disk.clear()


def reads_nothing(sim: TieredSim) -> None:
    complete = sim.prefetcher.complete
    sim.prefetcher.complete = lambda plan_id, filled: complete(plan_id, [False] * len(filled))  # type: ignore[method-assign]


def loses_what_came(sim: TieredSim) -> None:
    complete = sim.prefetcher.complete

    def gone(plan_id: int, filled: Sequence[bool]) -> None:
        complete(plan_id, filled)
        finish(flush(sim.manager.index, sim.manager.keeper, None))

    sim.prefetcher.complete = gone  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("disturb", "found", "reason"),
    [
        (lambda sim: None, 12, "partial_block"),
        (reads_late, 4, "late"),
        (computes_quicker, 4, "cheaper"),
        (loses_all, 4, "not_kept"),
        (reads_nothing, 4, "failed"),
        (loses_what_came, 0, "taken"),
    ],
)
def test_a_preempted_request_is_told_why_it_is_computed_again(
    disturb: Callable[[TieredSim], None], found: int, reason: str
) -> None:
    """Of 13 tokens the last is less than half a block, and 4 stay on the device."""
    sim = TieredSim(num_blocks=9, block_size=4, max_num_batched_tokens=16, latency=0)
    sim.set_rates(10**9, 5)
    sim.add("old", range(12), 20)
    new = sim.add("new", range(50, 56), 16, wants_events=True)
    while not sim.scheduler.preemptions():
        sim.step()
    disturb(sim)
    sim.run()
    (record,) = sim.scheduler.preemptions()
    assert (record.kind, record.num_tokens, record.num_tokens_found, record.reason) == ("swap", 13, found, reason)
    resumed = [event.details for output in sim.outputs for event in output.events if event.kind == "resumed"]
    assert [details.get("reason") for details in resumed] == [reason]
    assert new.output_token_ids == alone(new, (None,))


def test_a_restore_that_was_stopped_was_late() -> None:
    """It did not fail: nobody would have waited for the rest of it."""
    sim = TieredSim(num_blocks=11, block_size=4, max_num_batched_tokens=16, latency=0)
    sim.set_rates(10**9, 5)
    for number, (size, budget) in enumerate([(12, 20), (6, 16), (6, 16)]):
        sim.add(f"r{number}", range(50 * number, 50 * number + size), budget)
    while not sim.scheduler.preemptions():
        sim.step()
    sim.latency, sim.rng = 50, random.Random(3)
    sim.run()
    assert sim.num_stopped == 2
    found = [(record.num_tokens, record.num_tokens_found, record.reason) for record in sim.scheduler.preemptions()]
    assert found == [(12, 8, "late"), (17, 12, "late")]


@pytest.mark.parametrize(("latency", "write_latency"), [(0, 0), (2, 0), (2, 10**6)])
def test_what_was_swapped_is_brought_back_when_there_is_room_and_not_before(latency: int, write_latency: int) -> None:
    """Those that run grow into all that is free: what is brought back too early is lost to them before its request is admitted.
    It is found too while it is still being written, and none of it but one block has reached the disk."""
    sim = TieredSim(num_blocks=48, max_num_batched_tokens=512, latency=latency, write_latency=write_latency)
    sim.set_rates(10**9, 5)
    requests = [sim.add(f"r{number}", [100 * number + at for at in range(60)], 250) for number in range(8)]
    while sim.scheduler.has_work:
        sim.step()
    records = sim.scheduler.preemptions()
    assert len(records) > 5
    assert sum(record.num_tokens for record in records) > 1000
    for record in records:
        assert record.kind == "swap"
        assert record.num_tokens - record.num_tokens_found < 8, "all whole blocks were found, and last ones that were half full"
    assert any(record.num_tokens_found % 16 for record in records)
    assert (len(sim.disk) == 1) == bool(write_latency)
    # On the device or in the tier; none was read twice.
    assert sim.num_filled <= sum(-(-record.num_tokens_found // 16) for record in records)
    for request in requests:
        assert request.output_token_ids == alone(request, (None,))


def test_a_last_block_needs_no_room_to_be_copied_to() -> None:
    """Six groups have one each. Where the pool has room for a request and no more, it goes on in the very blocks that came."""
    windows = (8, 24, 8, 24, 8, None)
    sim = TieredSim(*windows, num_blocks=33, max_num_batched_tokens=32, latency=0)
    sim.set_rates(10**9, 5)
    requests = [sim.add(f"r{number}", [100 * number + at for at in range(24)], 60) for number in range(4)]
    sim.run()
    records = sim.scheduler.preemptions()
    assert [(record.num_tokens, record.num_tokens_found) for record in records] == [(31, 31), (66, 64)]
    for request in requests:
        assert request.output_token_ids == alone(request, windows)


@pytest.mark.parametrize(("num_blocks", "found"), [(7, 22), (6, 20)])
def test_a_beginning_is_read_only_where_there_is_room_for_its_copy(num_blocks: int, found: int) -> None:
    """The sixth block has 4 tokens there, and 2 are asked for."""
    sim = TieredSim(num_blocks=20, block_size=4)
    sim.generate("first", range(25), 1)
    new = TieredSim(num_blocks=num_blocks, block_size=4)
    new.restart_from(sim)
    request = new.generate("again", [*range(22), 90], 1)
    assert request.num_cached_tokens == found
    assert new.num_filled == -(-found // 4)
    probe = new.add("probe", [*range(22), 90], 1)
    whole = new.manager.match(probe).whole()
    assert new.prefetcher.admitted(probe, whole, 22) == (0, "no_room")
    assert request.output_token_ids == alone(request, (None,))


def test_blocks_that_are_lost_before_admission_are_brought_a_few_times_and_then_computed() -> None:
    sim = TieredSim(num_blocks=40, block_size=4)
    sim.generate("first", range(30), 1)
    new = restarted(sim, latency=0)
    new.set_rates(10**9, 1)
    request = new.add("again", range(30), 2)
    new.step()
    for _ in range(MAX_PLANS + 1):
        assert request.status is RequestStatus.WAITING
        new.deliver(everything=True)
        finish(flush(new.manager.index, new.manager.keeper, None))
        new.step()
        if new.outputs[-1].scheduled:
            break
    assert new.num_filled == MAX_PLANS * 8
    assert request.num_cached_tokens == 0
    new.run()
    assert request.output_token_ids == alone(request, (None,))


def test_nobody_runs_to_and_fro() -> None:
    """Many that grow together in a pool for a few: each gives way a few times, not once for each block that another needs."""
    sim = TieredSim(num_blocks=40, block_size=4, max_num_batched_tokens=64)
    requests = [sim.add(f"r{number}", [number, *range(10)], 100) for number in range(12)]
    sim.run()
    most = max(request.num_preemptions for request in requests)
    assert 0 < most <= 5, "once for each doubling of the room that it leaves"
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert request.output_token_ids == alone(request, (None,))


class TieredMachine(SchedulerMachine):
    """The scheduler's own machine over a tier that is slow, loses blocks and fails."""

    trouble: ClassVar[float] = 0.15
    latency: ClassVar[int] = 3
    write_latency: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.sim = TieredSim(
            *self.windows,
            num_blocks=self.num_blocks,
            block_size=4,
            max_num_seqs=5,
            max_num_batched_tokens=10,
            max_model_len=48,
            watermark=0.1,
            latency=self.latency,
            write_latency=self.write_latency,
            trouble=self.trouble,
            seed=5,
        )

    def advance(self, oldest: Request) -> None:
        restoring = self.sim.prefetcher.num_restoring
        output = self.sim.step()
        restoring = max(restoring, self.sim.prefetcher.num_restoring, len(output.restores))
        assert oldest.request_id in self.sim.rows(output) or restoring, "only a fill under way holds the oldest up"


class WindowedTieredMachine(TieredMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6, 6, 6, 6, 6)
    num_blocks: ClassVar[int] = 32


TestTiered = TieredMachine.TestCase
TestWindowedTiered = WindowedTieredMachine.TestCase
TestTiered.settings = TestWindowedTiered.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 12), ((None, 6, 6, 6, 6, 6), 26)])
@pytest.mark.parametrize("seed", range(2))
def test_tiny_pools_never_stop(windows: tuple[int | None, ...], num_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    sim = TieredSim(
        *windows, num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, latency=3, trouble=0.1, seed=seed
    )
    limit = min(48, sim.scheduler.effective_max_tokens)
    for number in range(30):
        length = rng.randrange(1, limit // 2)
        sim.add(f"r{number}", [rng.randrange(2) for _ in range(length)], rng.randrange(1, limit - length + 1))
    sim.run(20_000)
    assert all(len(request.output_token_ids) == request.max_tokens for request in sim.requests.values())
    assert sim.num_filled > 0
    assert sim.num_failed > 0
    assert sim.scheduler.stats().num_swaps > 0
    assert sim.manager.num_free_blocks == num_blocks
    for request in sim.requests.values():
        assert request.output_token_ids == alone(request, windows)
