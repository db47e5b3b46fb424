"""The scheduler under arbitrary traffic: every request finishes with the tokens it would have had alone, and nothing leaks."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.deciders import Sim
from kvist.request import EventKind, Request, RequestStatus


def alone(request: Request, windows: tuple[int | None, ...]) -> list[int]:
    """What a request generates with nobody else there, in a pool that is large enough, from one chunk."""
    sim = Sim(*windows, num_blocks=400, block_size=4)
    return sim.generate("alone", request.prompt_token_ids, request.max_tokens, salt=request.cache_salt).output_token_ids


class SchedulerMachine(RuleBasedStateMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None,)
    num_blocks: ClassVar[int] = 12
    use_cache: ClassVar[bool] = True
    priorities: ClassVar[tuple[int, ...]] = (0,)
    allocator: ClassVar[str] = "paged"
    beside: ClassVar[int | None] = None
    """What is left of the budget of 10 beside requests that take one row; None for what a scheduler leaves, which is all."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim(
            *self.windows,
            num_blocks=self.num_blocks,
            block_size=4,
            max_num_seqs=5,
            max_num_batched_tokens=10,
            max_model_len=48,
            use_cache=self.use_cache,
            watermark=0.1,
            allocator=self.allocator,
        )
        if self.beside is not None:
            self.sim.scheduler._beside = self.beside
        self.count = 0
        self.aborted: set[str] = set()
        self.overtaken = False

    @property
    def live(self) -> list[str]:
        return [name for name, request in self.sim.requests.items() if not request.finished]

    @precondition(lambda self: len(self.live) < 8)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(0, 16),
        salt=st.sampled_from(["", "", "", "x"]),
        scored=st.booleans(),
        choices=st.sampled_from([1, 1, 1, 2, 4]),
        data=st.data(),
    )
    def add(self, prompt: list[int], max_tokens: int, salt: str, scored: bool, choices: int, data: st.DataObject) -> None:
        self.count += 1
        priority = data.draw(st.sampled_from(self.priorities))
        scores = 0 if scored and max_tokens == 0 else None
        more = {"salt": salt, "prompt_logprobs": scores, "priority": priority, "wants_events": True}
        self.sim.add_choices(f"r{self.count}", prompt, choices, max_tokens, **more)

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.live:
                self.advance(self.oldest())

    def in_order(self) -> list[str]:
        """Who is here, by priority and then by arrival (the sort is stable)."""
        return sorted(self.live, key=lambda name: self.sim.requests[name].priority)

    def oldest(self) -> Request:
        """The first of those that run; if none does, the first of all."""
        running = self.sim.scheduler.running
        return running[0] if running else self.sim.requests[self.in_order()[0]]

    def advance(self, oldest: Request) -> None:
        pending = {request.request_id: request.num_tokens - request.num_computed_tokens for request in self.sim.scheduler.running}
        output = self.sim.step()
        rows = self.sim.rows(output)
        assert oldest.request_id in rows, "the oldest request always advances"
        assert output.num_batched_tokens == sum(count for _, count in rows.values()) <= 10
        # One that lacked a row may yield to an older one that lacks more; and where a fork yields, its blocks may be held by the
        # one that it yields to, which then stands still.
        given_way = {record.request_id for record in output.preempted}
        helped = [record.cause_request_id for record in output.preempted if record.num_blocks_freed]
        assert set(helped) <= rows.keys() | given_way
        assert not {record.request_id for record in output.preempted} & set(rows)
        assert not output.preempted or set(rows) <= set(pending), "nobody is admitted in a step that preempts"
        # One row to go comes before many, and both before newcomers.
        classes = [2 if name not in pending else pending[name] > 1 for name in rows]
        assert classes == sorted(classes)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        name = data.draw(st.sampled_from(self.live))
        self.aborted.add(name)
        if in_flight:
            output = self.sim.step(between=lambda: self.end(name))
            # Who was to fork off one that ends may be overtaken by those that were admitted behind it.
            self.overtaken |= any(item.forks for item in output.scheduled if item.request_id == name)
        else:
            self.end(name)

    def end(self, name: str) -> None:
        assert self.sim.scheduler.abort(name)

    @invariant()
    def sound(self) -> None:
        self.sim.scheduler.check_invariants()
        waiting, running = self.sim.scheduler.waiting, self.sim.scheduler.running
        if self.priorities == (0,) and not self.overtaken:
            assert [request.request_id for request in (*running, *waiting)] == self.live, "first come, first served"
        for queue in (running, waiting):
            names = {request.request_id for request in queue}
            assert [request.request_id for request in queue] == [name for name in self.in_order() if name in names]
        assert all(request.status is RequestStatus.RUNNING for request in running)

    def teardown(self) -> None:
        self.sim.run(2000)
        assert self.sim.manager.num_free_blocks == self.num_blocks
        for name, request in self.sim.requests.items():
            if name not in self.aborted:
                assert request.output_token_ids == alone(request, self.windows)
        total = sum(request.num_cached_tokens for request in self.sim.requests.values() if request.first_scheduled_time is not None)
        assert self.sim.scheduler.stats().num_cached_tokens == total
        for name, request in self.sim.requests.items():
            check_story([event.kind for output in self.sim.outputs for event in output.events if event.request_id == name], request)


def check_story(kinds: list[EventKind], request: Request) -> None:
    """What was told of one request, from its arrival to its end."""
    if kinds and kinds[0] == "waiting":
        kinds = kinds[1:]
        if kinds:
            assert kinds[0] == "started"
            kinds = kinds[1:]
    assert kinds.count("preempted") == request.num_preemptions
    assert all(before == "preempted" for before, kind in pairwise(kinds) if kind == "swapped")
    kinds = [kind for kind in kinds if kind != "swapped"]
    held_up = False
    for kind in kinds:
        assert held_up if kind == "resumed" else kind in ("preempted", "stalled")
        assert not (held_up and kind == "stalled"), "told twice"
        held_up = kind != "resumed"
    assert (request.stall_time > 0) == bool(kinds) or held_up


class WindowedMachine(SchedulerMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6, 6, 6, 6, 6)
    num_blocks: ClassVar[int] = 32


class NoCacheMachine(SchedulerMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6)
    num_blocks: ClassVar[int] = 15
    use_cache: ClassVar[bool] = False


class PriorityMachine(SchedulerMachine):
    priorities: ClassVar[tuple[int, ...]] = (-(2**40), 0, 0, 1)


class ContiguousMachine(SchedulerMachine):
    num_blocks: ClassVar[int] = 16
    allocator: ClassVar[str] = "contiguous"


class ContiguousWindowedMachine(ContiguousMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6, 6)
    num_blocks: ClassVar[int] = 40


class VirtualMachine(SchedulerMachine):
    num_blocks: ClassVar[int] = 14
    allocator: ClassVar[str] = "virtual"


class VirtualWindowedMachine(VirtualMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6, 6)
    num_blocks: ClassVar[int] = 40


class VirtualNoCacheMachine(VirtualMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6)
    num_blocks: ClassVar[int] = 26
    use_cache: ClassVar[bool] = False


class BesideMachine(SchedulerMachine):
    beside: ClassVar[int | None] = 2


TestBeside = BesideMachine.TestCase
TestScheduler = SchedulerMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestContiguousWindowed = ContiguousWindowedMachine.TestCase
TestVirtual = VirtualMachine.TestCase
TestVirtualWindowed = VirtualWindowedMachine.TestCase
TestVirtualNoCache = VirtualNoCacheMachine.TestCase
TestPriority = PriorityMachine.TestCase
TestWindowed = WindowedMachine.TestCase
TestNoCache = NoCacheMachine.TestCase
TestScheduler.settings = TestPriority.settings = TestWindowed.settings = TestNoCache.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
TestContiguous.settings = TestContiguousWindowed.settings = TestVirtual.settings = TestVirtualWindowed.settings = (
    TestVirtualNoCache.settings
) = TestBeside.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 12), ((None, 6, 6, 6, 6, 6), 26), ((20, 30), 16)])
@pytest.mark.parametrize("seed", range(3))
def test_tiny_pools_never_stop(windows: tuple[int | None, ...], num_blocks: int, seed: int, use_cache: bool) -> None:
    rng = random.Random(seed)
    sim = Sim(*windows, num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, use_cache=use_cache)
    limit = min(48, sim.scheduler.effective_max_tokens)
    for number in range(30):
        length = rng.randrange(1, limit // 2)
        sim.add(f"r{number}", [rng.randrange(2) for _ in range(length)], rng.randrange(1, limit - length + 1))
    sim.run(20_000)
    assert all(len(request.output_token_ids) == request.max_tokens for request in sim.requests.values())
    stats = sim.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_preemptions == sum(request.num_preemptions for request in sim.requests.values())
    assert stats.num_preemptions == sum(len(output.preempted) for output in sim.outputs)
    assert sim.requests["r0"].num_preemptions == 0
    assert sim.manager.num_free_blocks == num_blocks


def test_a_request_that_fills_the_pool_to_the_last_slot() -> None:
    for windows, num_blocks in [((None,), 5), ((None, 6, 6), 12), ((None, 9), 11)]:
        sim = Sim(*windows, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=7)
        limit = sim.scheduler.effective_max_tokens
        assert sim.spec.request_blocks(limit) <= num_blocks < sim.spec.request_blocks(limit + 1)
        request = sim.generate("all", range(limit - 5), 5)
        assert len(request.output_token_ids) == 5
        assert len(sim.generate("score", range(limit), 0).prompt_token_ids) == limit
