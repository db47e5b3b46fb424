"""The KV manager against a naive model: a dictionary of what can be found, who went on behind it, and an arena checked before each
read."""

from __future__ import annotations

from itertools import takewhile
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.deciders import Arena, make_request, make_spec
from kvist.errors import ContextLengthError
from kvist.kv import stretches
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
        self.passed: dict[int, Request] = {}
        self.unentered: dict[str, tuple[int, int]] = {}
        """Blocks from one to another that running requests have computed."""
        """By the fingerprint of a block that can be found (or, for beginnings, of nothing): who computed it, or the next, last."""
        self.tails: dict[int, tuple[int, list[int]]] = {}
        """By the fingerprint of the block before (or of nothing): name and tokens of the last block of who ended there."""
        self.named: dict[str, int] = {}
        """How many blocks of a request have been named: those that it was asked for, and those that it has computed."""
        self.fresh: set[str] = set()
        """Who has not computed anything since it was admitted."""
        self.ended: list[tuple[list[int], str]] = []
        """Tokens that had been computed of who has ended, and its salt; the latest last."""
        self.count = 0

    def marks(self, request: Request) -> list[int]:
        return self.arena.fingerprints(request)[SIZE - 1 :: SIZE]

    @precondition(lambda self: len(self.waiting) + len(self.running) < 6)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30), salt=st.sampled_from(["", "", "", "x"]))
    def add(self, prompt: list[int], salt: str) -> None:
        self.queue([0] * (len(prompt) // 2) + prompt, salt)

    @precondition(lambda self: self.ended and len(self.waiting) + len(self.running) < 5)
    @rule(more=st.lists(st.integers(0, 1), min_size=1, max_size=6), ways=st.lists(st.integers(0, 2), max_size=2))
    def add_next_turns(self, more: list[int], ways: list[int]) -> None:
        """Two go on where the latest ended, in its last block, which one may hold when the other comes to it."""
        tokens, salt = self.ended[-1]
        for token in range(2):
            self.queue([*tokens, token, *more], salt)
        for way, request_id in zip(ways, list(self.waiting)[-2:], strict=False):
            self.start(self.waiting.pop(request_id), way)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), way=st.integers(0, 2))
    def serve(self, data: st.DataObject, way: int) -> None:
        """All of a request at once, if there is room for it."""
        request = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.start(request, way)
        self.advance(request, request.num_tokens)
        self.same()
        self.finish(request.request_id)

    def queue(self, prompt: list[int], salt: str) -> None:
        self.count += 1
        request = make_request(f"r{self.count}", prompt, salt=salt)
        try:
            self.manager.add(request)
        except ContextLengthError:
            assert self.manager.pins.num_taken, "only pins leave too little for a request that the pool could hold"
            return
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), way=st.integers(0, 2))
    def admit(self, data: st.DataObject, way: int) -> None:
        self.start(self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting)))), way)

    @precondition(lambda self: len(self.waiting) + len(self.running) < 5)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=SIZE, max_size=3 * SIZE), more=st.integers(0, 1))
    def add_twins(self, prompt: list[int], more: int) -> None:
        """Two compute the same blocks at once, and one goes on."""
        twins = []
        for _ in range(2):
            self.add(prompt, "")
            if (request := self.waiting.pop(f"r{self.count}", None)) is None:
                return
            self.start(request)
            twins.append(request)
        for request in twins:
            self.advance(request, request.num_tokens)
        twins[more].output_token_ids += prompt
        self.advance(twins[more], len(prompt))

    def start(self, request: Request, way: int = 0) -> None:
        self.enter()
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
        self.name(request, (request.num_tokens - 1) // SIZE)
        copied, sources = self.beginning(request, best)
        assert (match.num_tokens, match.num_copied) == (best * SIZE + copied, copied)
        assert list(match.copied_from) == sources
        assert match.num_tokens < request.num_tokens
        for group, window in enumerate(self.windows):
            first = first_block(best * SIZE, window, SIZE)
            assert list(match.block_ids[group]) == [0] * first + [self.found[group, mark] for mark in marks[first:best]]
        ways = self.manager.ways(request, match)
        assert [one.takes_over for one in ways] == [False, *[True] * self.is_spare_tail(request, best, copied, sources), False][
            : len(ways)
        ]
        chosen = ways[way % len(ways)]
        if chosen.takes_over:
            self.found = {name: block for name, block in self.found.items() if block not in sources}
        self.manager.attach(request, chosen)
        request.num_computed_tokens = chosen.num_tokens
        self.running[request.request_id] = request
        self.fresh.add(request.request_id)

    def name(self, request: Request, num_blocks: int) -> None:
        self.named[request.request_id] = max(num_blocks, self.named.get(request.request_id, 0))

    def beginning(self, request: Request, best: int) -> tuple[int, list[int]]:
        """How much of one more block there is to copy, and where."""
        before = self.marks(request)[best - 1] if best else hash(request.cache_salt)
        start, stop = best * SIZE, min((best + 1) * SIZE, request.num_tokens) - 1
        candidates = [self.tails[before]] if before in self.tails else []
        other = self.passed.get(before)
        if (
            other is not None
            and best < self.named[other.request_id]
            and (not best or first_block(start, self.windows[0], SIZE) < best)
        ):
            candidates.insert(0, (self.marks(other)[best], other.token_ids(start, stop)))
        longest: tuple[int, list[int]] = (0, [])
        for name, tokens in candidates:
            pairs = zip(tokens, request.token_ids(start, stop), strict=False)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            sources = [self.found[group, name] for group in range(len(self.windows)) if (group, name) in self.found]
            if common > longest[0] and len(sources) == len(self.windows):
                longest = common, sources
        return longest

    def is_spare_tail(self, request: Request, best: int, copied: int, sources: list[int]) -> bool:
        """Whether what would be copied are last blocks that nobody holds, and all that they have."""
        name, tokens = self.tails.get(self.marks(request)[best - 1] if best else hash(request.cache_salt), (0, []))
        tails = [self.found.get((group, name)) for group in range(len(self.windows))]
        held = self.live()
        return copied > 0 and tails == sources and len(tokens) == copied and not held & set(sources)

    @precondition(lambda self: self.running and len(self.waiting) + len(self.running) < 6)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def fork(self, data: st.DataObject, more: list[int]) -> None:
        source = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.count += 1
        prompt = [*source.token_ids(0, source.num_computed_tokens), *more]
        request = make_request(f"r{self.count}", prompt, salt=source.cache_salt)
        try:
            self.manager.add(request)
        except ContextLengthError:
            return
        before, free = self.held(source), self.manager.num_free_blocks
        self.enter()
        self.manager.fork(source, request)
        self.name(request, source.num_computed_tokens // SIZE)
        request.num_computed_tokens = source.num_computed_tokens
        self.running[request.request_id] = request
        if source.request_id in self.fresh:
            self.fresh.add(request.request_id)
        assert self.held(request) == self.held(source) == before
        assert self.manager.num_free_blocks == free, "what is held already costs nothing"

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
        shared = self.shared(request)
        fit = self.manager.fit(request, rows)
        assert 0 <= fit <= rows
        assert self.manager.allocate(request, rows) is (fit == rows)
        if fit < rows:
            assert self.held(request) == before
            return
        self.manager.check_invariants()
        plan = self.manager.take_plan()
        self.arena.carry_out(plan)
        assert [source for source, _ in plan.copies] == shared
        new = self.held(request) - before
        self.found = {name: block for name, block in self.found.items() if block not in new}
        start = request.num_computed_tokens
        tables = self.manager.block_tables(request)
        self.arena.read(request, tables, start, start + rows)
        written = self.arena.write(request, tables, start, start + rows)
        assert not {block for block, _ in written} & set(self.found.values()), "a block that can be found is written"
        blocks = {block for block, _ in written}
        assert not any(blocks & self.held(other) for other in self.running.values() if other is not request), "another's block"
        request.num_computed_tokens += rows
        self.name(request, request.num_computed_tokens // SIZE)
        self.manager.complete_plan()
        self.manager.commit(request)
        if request.num_computed_tokens // SIZE > start // SIZE:
            first, _ = self.unentered.get(request.request_id, (start // SIZE, 0))
            self.unentered[request.request_id] = first, request.num_computed_tokens // SIZE
        if any(window is not None for window in self.windows):
            self.enter()
        self.manager.trim(request)
        self.fresh.discard(request.request_id)
        for table, window in zip(tables, self.windows, strict=True):
            assert not any(table[: first_block(request.num_computed_tokens, window, SIZE)])

    def enter(self) -> None:
        """What has been computed can be found from now on: as soon as anybody asks."""
        for request_id, (start, stop) in self.unentered.items():
            self.note(self.running[request_id], start, stop)
        self.unentered = {}

    def note(self, request: Request, start: int, stop: int) -> None:
        """These blocks have been computed."""
        marks, kept = self.marks(request), self.kept()
        for group, table in enumerate(self.manager.block_tables(request)):
            for block in range(start, stop):
                if self.found.get((group, marks[block])) not in kept:
                    self.found[group, marks[block]] = table[block]
        before = marks[start - 1] if start else hash(request.cache_salt)
        self.passed[before] = request
        if before in self.tails:
            name, tokens = self.tails[before]
            if request.token_ids(start * SIZE, start * SIZE + len(tokens)) == tokens:
                del self.tails[before]
                self.drop(name)
        for block in range(start, stop):
            if block < stop - 1 or self.found[0, marks[block]] == self.manager.block_tables(request)[0][block]:
                self.passed[marks[block]] = request

    def keep(self, request: Request) -> None:
        """Before a request lets go of its blocks: those whose content is not found any more, or in one that nobody holds, are found
        themselves from now on."""
        marks, kept, position = self.marks(request), self.kept(), self.position(request)
        for group, (table, window) in enumerate(zip(self.manager.block_tables(request), self.windows, strict=True)):
            for block in range(first_block(position, window, SIZE), request.num_computed_tokens // SIZE):
                name = group, marks[block]
                if self.found.get(name) not in kept:
                    if name not in self.found and not group:
                        self.passed[marks[block]] = request
                    self.found[name] = table[block]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.integers(0, 8))
    def preempt(self, data: st.DataObject, rows: int) -> None:
        """Maybe after it got room in the same step."""
        self.enter()
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        before = self.held(request)
        rows = min(rows, request.num_tokens - request.num_computed_tokens)
        if rows and self.manager.allocate(request, rows):
            self.manager.check_invariants()
            new = self.held(request) - before
            self.found = {name: block for name, block in self.found.items() if block not in new}
        self.running[request.request_id] = request
        self.keep(request)
        del self.running[request.request_id]
        free = self.manager.num_free_blocks
        assert self.manager.release(request) == self.manager.num_free_blocks - free
        request.num_computed_tokens = 0
        assert not self.manager.take_plan(), "nobody reads what was to be copied"
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(sorted({**self.running, **self.waiting}))))

    def finish(self, request_id: str) -> None:
        self.enter()
        if request_id in self.running:
            self.keep(self.running[request_id])
        running = self.running.pop(request_id, None)
        request = running or self.waiting.pop(request_id)
        tables = [list(table) for table in self.manager.block_tables(request)]
        self.manager.free(request)
        if running is not None:
            self.note_tail(request, tables)
            if request.num_computed_tokens % SIZE:
                self.ended.append((request.token_ids(0, request.num_computed_tokens), request.cache_salt))
        if not request.num_computed_tokens:
            # Who ends as one that has computed nothing is not remembered.
            self.passed = {mark: other for mark, other in self.passed.items() if other is not request}

    def note_tail(self, request: Request, tables: list[list[int]]) -> None:
        """Of who has ended at least half a block behind a whole one, that block can be found, unless another holds it too."""
        block, rest = divmod(request.num_computed_tokens, SIZE)
        if 2 * rest < SIZE:
            return
        before = self.marks(request)[block - 1] if block else hash(request.cache_salt)
        name = self.arena.fingerprints(request)[request.num_computed_tokens - 1]
        if any(table[block] in self.live() for table in tables):
            return
        for group, table in enumerate(tables):
            if table[block] not in self.found.values():
                self.found.setdefault((group, name), table[block])
        if all((group, name) in self.found for group in range(len(self.windows))):
            earlier = self.tails.get(before)
            self.tails[before] = (name, request.token_ids(block * SIZE, request.num_computed_tokens))
            if earlier is not None and earlier[0] != name:
                self.drop(earlier[0])

    def drop(self, name: int) -> None:
        """Nobody is led to this tail any more."""
        held = self.live()
        for group in range(len(self.windows)):
            if self.found.get((group, name), None) not in held | {None}:
                del self.found[group, name]

    def shared(self, request: Request) -> list[int]:
        """What the next row would write to and must not: the index names it, or another holds it."""
        block, offset = divmod(request.num_computed_tokens, SIZE)
        tails = [table[block] for table in self.manager.block_tables(request)] if offset else []
        others = set(self.found.values()).union(*(self.held(other) for other in self.running.values() if other is not request))
        return [tail for tail in tails if tail in others]

    def held(self, request: Request) -> set[int]:
        tables, position = self.manager.block_tables(request), self.position(request)
        firsts = [first_block(position, window, SIZE) for window in self.windows]
        return {block for table, first in zip(tables, firsts, strict=True) for block in table[first:]}

    def position(self, request: Request) -> int:
        """What lies before its window is let go: after the next step, if the beginning of a block was found."""
        return request.num_computed_tokens if request.request_id not in self.fresh else request.num_computed_tokens // SIZE * SIZE

    def live(self) -> set[int]:
        return set().union(*(self.held(request) for request in self.running.values()))

    def kept(self) -> set[int]:
        """Blocks in whose place no other of their content is found."""
        return self.live()

    @invariant()
    def same(self) -> None:
        self.manager.check_invariants()
        usage = self.manager.usage()
        live = self.live()
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


class LeastRecentMachine(ManagerMachine):
    """With lru and no claims no block outlives the one before it, where nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVManager(self.spec, self.num_blocks, watermark=0.0, eviction_policy="lru")

    @invariant()
    def in_order(self) -> None:
        self.enter()
        stretches = {stretch for stretch in self.manager.index.stretches_of(0, self.num_blocks) if stretch is not None}
        for stretch in stretches:
            if stretch.parent != stretch.root and not self.manager.keeper.pool.ref_count(stretch.block_ids()[0]):
                assert any(other.offset_of(stretch.parent) is not None for other in stretches)


@pytest.fixture(autouse=True)
def short_prefixes_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens: those of the machine have few blocks."""
    monkeypatch.setattr(stretches, "MIN_RECALLED", 2)


TestManager = ManagerMachine.TestCase
TestWindowed = WindowedMachine.TestCase
TestMixedWindows = MixedWindowsMachine.TestCase
TestLeastRecent = LeastRecentMachine.TestCase
TestManager.settings = TestWindowed.settings = TestMixedWindows.settings = TestLeastRecent.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
