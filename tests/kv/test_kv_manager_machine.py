"""The KV manager against a naive model: a dictionary of what can be found, and an arena checked before each read."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.deciders import Arena, make_request, make_spec
from kvist.errors import ContextLengthError
from kvist.kv.manager import KVManager
from kvist.kv.spec import first_block
from kvist.request import Request

SIZE = 4


class ManagerMachine(RuleBasedStateMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None,)
    num_blocks: ClassVar[int] = 14

    def __init__(self) -> None:
        super().__init__()
        self.spec = make_spec(*self.windows, block_size=SIZE)
        self.manager = KVManager(self.spec, self.num_blocks, watermark=0.0)
        self.arena = Arena(self.spec, self.num_blocks)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.found: dict[tuple[int, int], int] = {}
        """The naive index: (group, fingerprint of the block's last token) -> block id."""
        self.count = 0

    def marks(self, request: Request) -> list[int]:
        return self.arena.fingerprints(request)[SIZE - 1 :: SIZE]

    @precondition(lambda self: len(self.waiting) + len(self.running) < 6)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30), salt=st.sampled_from(["", "", "", "x"]))
    def add(self, prompt: list[int], salt: str) -> None:
        self.count += 1
        request = make_request(f"r{self.count}", [0] * (len(prompt) // 2) + prompt, salt=salt)
        try:
            self.manager.add(request)
        except ContextLengthError:
            assert self.manager.pins.num_taken, "only pins leave too little for a request that the pool could hold"
            return
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.start(self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting)))))

    def start(self, request: Request) -> None:
        marks = self.marks(request)
        lengths = range((request.num_tokens - 1) // SIZE + 1)
        best = max(
            length
            for length in lengths
            if all(
                (group, marks[block]) in self.found
                for group, window in enumerate(self.windows)
                for block in range(first_block(length * SIZE, window, SIZE), length)
            )
        )
        match = self.manager.match(request)
        assert match.num_tokens == best * SIZE
        for group, window in enumerate(self.windows):
            first = first_block(best * SIZE, window, SIZE)
            assert list(match.block_ids[group]) == [0] * first + [self.found[group, mark] for mark in marks[first:best]]
        self.manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.integers(1, 12))
    def compute(self, data: st.DataObject, rows: int) -> None:
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if request.num_computed_tokens == request.num_tokens:
            request.output_token_ids.append(rows % 2)
        self.advance(request, rows)

    def advance(self, request: Request, rows: int) -> None:
        rows = min(rows, request.num_tokens - request.num_computed_tokens)
        before = self.held(request)
        fit = self.manager.fit(request, rows)
        assert 0 <= fit <= rows
        assert self.manager.allocate(request, rows) is (fit == rows)
        if fit < rows:
            assert self.held(request) == before
            return
        new = self.held(request) - before
        self.found = {name: block for name, block in self.found.items() if block not in new}
        start = request.num_computed_tokens
        tables = self.manager.block_tables(request)
        self.arena.read(request, tables, start, start + rows)
        written = self.arena.write(request, tables, start, start + rows)
        assert not {block for block, _ in written} & set(self.found.values()), "a block that can be found is written"
        request.num_computed_tokens += rows
        for group, table in enumerate(tables):
            for block in range(start // SIZE, request.num_computed_tokens // SIZE):
                self.found.setdefault((group, self.marks(request)[block]), table[block])
        self.manager.commit(request)
        self.manager.trim(request)
        for table, window in zip(tables, self.windows, strict=True):
            assert not any(table[: first_block(request.num_computed_tokens, window, SIZE)])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        free = self.manager.num_free_blocks
        assert self.manager.release(request) == self.manager.num_free_blocks - free
        request.num_computed_tokens = 0
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted({**self.running, **self.waiting})))
        self.manager.free(self.running.pop(request_id, None) or self.waiting.pop(request_id))

    def held(self, request: Request) -> set[int]:
        tables = self.manager.block_tables(request)
        firsts = [first_block(request.num_computed_tokens, window, SIZE) for window in self.windows]
        return {block for table, first in zip(tables, firsts, strict=True) for block in table[first:]}

    @invariant()
    def same(self) -> None:
        self.manager.check_invariants()
        usage = self.manager.usage()
        live = set().union(*(self.held(request) for request in self.running.values()))
        assert usage.live == len(live)
        assert usage.cached == len(set(self.found.values()) - live)
        assert usage.live + usage.cached + usage.free == usage.total == self.num_blocks
        assert usage.live + self.manager.num_free_blocks == self.num_blocks

    def teardown(self) -> None:
        for request in [*self.running.values(), *self.waiting.values()]:
            self.manager.free(request)
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.num_blocks


class WindowedMachine(ManagerMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6, 6, 6, 6, 6)
    num_blocks: ClassVar[int] = 60


class MixedWindowsMachine(ManagerMachine):
    windows: ClassVar[tuple[int | None, ...]] = (1, 5, 9)
    num_blocks: ClassVar[int] = 20


TestManager = ManagerMachine.TestCase
TestWindowed = WindowedMachine.TestCase
TestMixedWindows = MixedWindowsMachine.TestCase
TestManager.settings = TestWindowed.settings = TestMixedWindows.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
