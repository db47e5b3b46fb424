"""The manager with policies, priorities, pins and time, against the naive model of the manager's machine and a list of claims."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_kv_manager_machine import SIZE, ManagerMachine

from helpers.deciders import Arena, make_request, make_spec
from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv import stretches
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.walks import finish, flush

BUDGET = 0.5


class RetentionMachine(ManagerMachine):
    policy: ClassVar[str] = "density"

    def __init__(self) -> None:
        super().__init__()
        self.spec = make_spec(*self.windows, block_size=SIZE)
        self.manager = KVManager(self.spec, self.num_blocks, watermark=0.0, eviction_policy=self.policy, pin_budget=BUDGET)
        self.arena = Arena(self.spec, self.num_blocks)
        self.retention = self.manager.keeper.retention
        self.now = 0.0
        self.entered: set[str] = set()
        self.pins: list[tuple[str, float, set[tuple[int, int]]]] = []
        """Salt, deadline and names of what requests have pinned."""

    @precondition(lambda self: len(self.waiting) + len(self.running) < 6)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        salt=st.sampled_from(["", "x"]),
        pin=st.sampled_from([True, True, False]),
        priority=st.sampled_from([None, 0, 70, 100]),
        ttl=st.sampled_from([None, 3.0, 10.0]),
    )
    def serve_kept(self, prompt: list[int], salt: str, pin: bool, priority: int | None, ttl: float | None) -> None:
        self.count += 1
        request = make_request(f"r{self.count}", [0] * (len(prompt) // 2) + prompt, salt=salt)
        if pin or priority is not None:
            request.kv = KVHints(pin, ttl, priority)
        try:
            self.manager.add(request)
        except (InvalidRequestError, ContextLengthError):
            assert request.request_id not in self.manager.request_ids
            return
        if pin:
            self.name(request, request.num_prompt_tokens // SIZE)
        self.start(request)
        self.advance(request, request.num_tokens)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.manager.advance(self.now)
        self.pins = [claim for claim in self.pins if claim[1] > self.now]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.enter()
        salt, _, names = data.draw(st.sampled_from(self.pins))
        root, _ = self.manager.hashes_of((), salt)
        self.manager.keeper.withdraw(root, [self.found[name] for name in sorted(names)])
        self.pins = [claim for claim in self.pins if claim[0] != salt or not claim[2] & names]

    @rule(salt=st.sampled_from([None, "", "x"]))
    def flush(self, salt: str | None) -> None:
        self.enter()
        keeper = self.manager.keeper
        free = set(keeper.pool.free_among(range(self.num_blocks)))
        root = None if salt is None else self.manager.hashes_of((), salt)[0]
        mine = {block for block in free if root is None or self.manager.index.root_of(block) == root}
        assert finish(flush(self.manager.index, keeper, root)) == len(mine)
        self.found = {name: block for name, block in self.found.items() if block not in mine}

    def kept(self) -> set[int]:
        return self.live().union(self.retention.claimed())

    @invariant()
    def same(self) -> None:
        for request in self.running.values():
            kept = request.kv is not None and request.request_id not in self.entered
            if kept and request.num_computed_tokens >= request.num_prompt_tokens:
                assert request.kv is not None
                self.enter()
                self.entered.add(request.request_id)
                marks = self.marks(request)[: request.num_prompt_tokens // SIZE]
                names = {(group, mark) for group in range(len(self.windows)) for mark in marks if (group, mark) in self.found}
                deadline = float("inf") if request.kv.ttl is None else self.now + request.kv.ttl
                if names and request.kv.pin:
                    self.pins.append((request.cache_salt, deadline, names))
        self.manager.check_invariants()
        pinned = {self.found[name] for _, _, names in self.pins for name in names}
        assert pinned == set(self.retention.pinned_blocks())
        assert len(pinned) == self.manager.num_pinned_blocks <= self.manager.pins.num_taken <= int(BUDGET * self.num_blocks)
        live = pinned | self.live()
        usage = self.manager.usage()
        assert usage.live == len(live)
        assert usage.cached == len(set(self.found.values()) - live)
        assert usage.live + usage.cached + usage.free == usage.total

    def teardown(self) -> None:
        for request in [*self.running.values(), *self.waiting.values()]:
            self.manager.free(request)
        assert self.manager.num_free_blocks + self.manager.num_pinned_blocks == self.num_blocks
        for salt in ("", "x"):
            root, _ = self.manager.hashes_of((), salt)
            self.manager.keeper.withdraw(root, range(self.num_blocks))
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.num_blocks


class LruMachine(RetentionMachine):
    policy: ClassVar[str] = "lru"
    windows: ClassVar[tuple[int | None, ...]] = (None, 6)
    num_blocks: ClassVar[int] = 24


@pytest.fixture(autouse=True)
def short_prefixes_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens: those of the machine have few blocks."""
    monkeypatch.setattr(stretches, "MIN_RECALLED", 2)


TestDensity = RetentionMachine.TestCase
TestLru = LruMachine.TestCase
TestDensity.settings = TestLru.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
