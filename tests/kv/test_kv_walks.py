"""Walks in pieces: what they tell and take out while blocks come and go between the pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_kv_manager_machine import SIZE
from test_kv_retention_machine import RetentionMachine

from helpers.deciders import make_request, make_spec
from kvist.kv import stretches, walks
from kvist.kv.block import BlockHash
from kvist.kv.manager import KVManager
from kvist.kv.walks import Listing, Walk, finish
from kvist.request import Request


def serve(manager: KVManager, prompt: list[int], salt: str = "", *, free: bool = True) -> Request:
    request = make_request(str(random.getrandbits(64)), prompt, 1, salt=salt)
    manager.add(request)
    match = manager.match(request)
    manager.attach(request, match)
    granted = manager.allocate(request, len(prompt) - match.num_tokens)
    assert granted
    request.num_computed_tokens = len(prompt)
    manager.commit(request)
    if free:
        manager.free(request)
    return request


def prompt(name: int, blocks: int) -> list[int]:
    return [name] * (SIZE * blocks) + [0]


def make_manager(num_blocks: int = 40) -> KVManager:
    return KVManager(make_spec(block_size=SIZE), num_blocks, watermark=0.0, eviction_policy="lru")


def root(manager: KVManager, salt: str | None) -> BlockHash | None:
    return None if salt is None else manager.hashes_of((), salt)[0]


def page(manager: KVManager, salt: str | None, start: int, limit: int) -> tuple[list[int], int | None]:
    found, following = finish(walks.blocks_from(manager.index, manager.keeper, root(manager, salt), start, limit))
    return [block.block_id for block in found], following


def names_of(listing: Listing) -> Iterator[tuple[BlockHash, BlockHash]]:
    """Each block's and the one before it."""
    for part in listing.parts:
        for before, names in part.blocks():
            yield from zip(names, (before, *names), strict=False)


def test_pages_go_by_id_and_tell_where_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 3)
    manager = make_manager()
    serve(manager, prompt(1, 4))
    serve(manager, prompt(2, 2), "x")
    open_request = serve(manager, prompt(3, 3), free=False)
    ids, _ = page(manager, None, 0, 100)
    assert len(ids) == 9
    assert ids == sorted(ids)
    mine, theirs = page(manager, "", 0, 100)[0], page(manager, "x", 0, 100)[0]
    assert (len(mine), len(theirs), sorted(mine + theirs)) == (7, 2, ids)
    told, start = list[int](), 0
    while True:
        found, following = page(manager, "", start, 2)
        told += found
        if following is None:
            break
        assert len(found) == 2
        start = following
    assert told == mine
    assert page(manager, "", mine[-1] + 1, 5) == ([], None)
    assert page(manager, None, 10_000, 5) == ([], None)
    held, _ = finish(walks.blocks_from(manager.index, manager.keeper, None, 0, 100))
    assert [block.block_id for block in held if block.holders == 1] == sorted(manager.block_tables(open_request)[0][:3])
    (first,) = [block for block in held if block.block_id == manager.block_tables(open_request)[0][0]]
    assert first == (
        first.block_id,
        manager.index.hash_of(first.block_id),
        root(manager, ""),
        root(manager, ""),
        SIZE,
        1,
        50,
        False,
    )
    assert manager.index.count_in(0, root(manager, "")) == manager.index.count(root(manager, "")) == 7


def test_a_walk_takes_as_many_pieces_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 8)
    monkeypatch.setattr(walks, "FLUSHED_BLOCKS", 3)
    manager = make_manager()
    for name in range(10):
        serve(manager, prompt(name + 1, 2))
    index, keeper = manager.index, manager.keeper
    assert len(list(walks.listing(index, keeper, None))) == 5
    assert len(list(walks.blocks_from(index, keeper, None, 0, 100))) == 5
    pieces, left = 0, [index.count()]
    for _ in walks.flush(index, keeper, None):
        pieces += 1
        left.append(index.count())
    taken = [before - after for before, after in pairwise(left) if before > after]
    assert taken == [4] * 5, "two stretches are the first that have three blocks"
    assert [len(event.block_hashes) for event in keeper.events.since(0, 1000) if event.reason == "flushed"] == taken
    assert pieces > len(taken)
    assert index.count() == 0
    manager.check_invariants()


def test_what_was_held_and_is_let_go_before_the_end_is_flushed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 4)
    manager = make_manager()
    early, late = (serve(manager, prompt(name, 2), free=False) for name in (1, 2))
    serve(manager, prompt(3, 5))
    serve(manager, prompt(4, 2), "x")
    walk = walks.flush(manager.index, manager.keeper, root(manager, ""))
    for _ in range(5):
        next(walk)
    manager.free(early)
    assert finish(walk) == 2 + 5
    left = page(manager, None, 0, 100)[0]
    assert left == sorted([*manager.block_tables(late)[0][:2], *page(manager, "x", 0, 100)[0]])
    manager.free(late)
    assert len(page(manager, "", 0, 100)[0]) == 2, "who held it to the end keeps it"
    manager.check_invariants()


def test_what_is_taken_hold_of_meanwhile_stays_and_what_is_new_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 2)
    manager = make_manager()
    for name in (1, 2, 3):
        serve(manager, prompt(name, 3))
    walk = walks.flush(manager.index, manager.keeper, None)
    next(walk)
    last = serve(manager, prompt(3, 3), free=False)
    assert manager.block_tables(last)[0][0] in page(manager, None, 0, 100)[0]
    assert finish(walk) == 6
    assert page(manager, None, 0, 100)[0] == sorted(manager.block_tables(last)[0][:3])
    manager.check_invariants()


def test_each_stretch_of_those_that_lie_interleaved_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 2)
    manager = make_manager(12)
    requests = [make_request(str(name), prompt(name, 4), 1) for name in (1, 2, 3)]
    for request in requests:
        manager.add(request)
    for end in range(SIZE, 4 * SIZE + 1, SIZE):
        for request in requests:
            assert manager.allocate(request, SIZE)
            request.num_computed_tokens = end
            manager.commit(request)
    told = list(names_of(finish(walks.listing(manager.index, manager.keeper, None))))
    expected = []
    for request in requests:
        owner, names = manager.hashes_of(request.prompt_token_ids, "")
        expected += zip(names, (owner, *names), strict=False)
    assert told == expected
    assert page(manager, None, 0, 12) == (list(range(12)), None)


def test_an_id_that_another_owner_has_meanwhile_is_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 4)
    manager = make_manager(8)
    held = serve(manager, prompt(1, 4), free=False)
    walk = walks.flush(manager.index, manager.keeper, root(manager, ""))
    next(walk)
    manager.free(held)
    serve(manager, prompt(2, 6), "x")
    assert page(manager, "", 0, 9)[0] == [0]
    assert {2, 3} < set(page(manager, "x", 0, 9)[0])
    assert finish(walk) == 1
    assert (page(manager, "", 0, 9)[0], len(page(manager, "x", 0, 9)[0])) == ([], 6)
    manager.check_invariants()


def twins(manager: KVManager, salt: str = "") -> tuple[Request, Request]:
    """Two that have computed the same three blocks at once. Those of the first, which have the higher ids, are the ones found."""
    second, first = (make_request(str(random.getrandbits(64)), prompt(1, 3), 1, salt=salt) for _ in range(2))
    for request in (second, first):
        manager.add(request)
        assert manager.allocate(request, request.num_tokens)
    for request in (first, second):
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
    return first, second


def test_a_flush_finds_what_has_moved_to_another_block_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 4)
    manager = make_manager()
    first, second = twins(manager)
    manager.free(first)
    assert page(manager, "", 0, 100)[0] == [4, 5, 6]
    walk = walks.flush(manager.index, manager.keeper, root(manager, ""))
    next(walk)
    manager.free(second)
    assert page(manager, "", 0, 100)[0] == [0, 1, 2]
    assert finish(walk) == 3
    assert page(manager, "", 0, 100)[0] == []
    manager.check_invariants()


def test_a_listing_tells_what_has_moved_to_another_block_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 4)
    manager = make_manager()
    first, second = twins(manager)
    manager.free(first)
    before = list(names_of(finish(walks.listing(manager.index, manager.keeper, None))))
    walk = walks.listing(manager.index, manager.keeper, root(manager, ""))
    next(walk)
    manager.free(second)
    assert list(names_of(finish(walk))) == before
    assert len(before) == 3


@dataclass
class _Open:
    kind: str
    root: BlockHash | None
    walk: Walk[Any]
    start: int
    always: dict[int, tuple[BlockHash, BlockHash, int]]
    """Blocks that are cached since it began: name, name before, group."""
    seen: set[tuple[BlockHash, BlockHash]] = field(default_factory=set)
    """What was there when a piece was taken."""
    holders: dict[BlockHash, set[int]] = field(default_factory=dict)


class WalkMachine(RetentionMachine):
    """All that a manager does comes between the pieces of up to three walks."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[_Open] = []
        self.removed: list[int] = []
        index = self.manager.index
        remove, replace = index.remove, index.replace

        def watched(block_ids: list[int]) -> list[stretches.Removed]:
            self.removed += block_ids
            for one in self.open:
                for block_id in block_ids:
                    one.always.pop(block_id, None)
            return remove(block_ids)

        def replaced(block_id: int, other: int) -> None:
            for one in self.open:
                if (place := one.always.pop(other, None)) is not None and one.kind != "page":
                    one.always[block_id] = place
            replace(block_id, other)

        index.remove, index.replace = watched, replaced  # type: ignore[method-assign]

    def cached(self, root: BlockHash | None) -> dict[int, tuple[BlockHash, BlockHash, int]]:
        found = {}
        for block_id, stretch in enumerate(self.manager.index.stretches_of(0, self.num_blocks)):
            if stretch is not None and root in (None, stretch.root):
                offset = stretch.block_ids().index(block_id)
                before = stretch.name(offset - 1) if offset else stretch.parent
                found[block_id] = stretch.name(offset), before, stretch.group
        return found

    @precondition(lambda self: len(self.open) < 3)
    @rule(
        kind=st.sampled_from(["page", "listing", "flush"]),
        salt=st.sampled_from([None, "", "x"]),
        start=st.integers(0, 6),
        limit=st.integers(1, 9),
    )
    def begin(self, kind: str, salt: str | None, start: int, limit: int) -> None:
        self.enter()
        owner, index, keeper = root(self.manager, salt), self.manager.index, self.manager.keeper
        walk: Walk[Any] = walks.blocks_from(index, keeper, owner, start, limit)
        if kind == "listing":
            walk = walks.listing(index, keeper, owner)
        elif kind == "flush":
            walk = walks.flush(index, keeper, owner)
        self.open.append(_Open(kind, owner, walk, start, self.cached(owner)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 4))
    def go_on(self, data: st.DataObject, count: int) -> None:
        one = data.draw(st.sampled_from(self.open))
        for _ in range(count):
            if one in self.open:
                self.step(one)

    @precondition(lambda self: self.open)
    @rule()
    def all_go_on(self) -> None:
        for one in list(self.open):
            self.step(one)

    def step(self, one: _Open) -> None:
        self.enter()
        pool, before = self.manager.keeper.pool, self.cached(None)
        held = {block_id for block_id in before if pool.ref_count(block_id)}
        mine = self.cached(one.root)
        for block_id, (name, parent, group) in mine.items():
            if not group:
                one.seen.add((name, parent))
                one.holders.setdefault(name, set()).add(pool.ref_count(block_id))
        self.removed = []
        try:
            next(one.walk)
        except StopIteration as end:
            self.open.remove(one)
            getattr(self, f"check_{one.kind}")(one, end.value)
        assert not held & set(self.removed), "somebody's block"
        assert set(self.removed) <= (mine.keys() if one.kind == "flush" else set())
        self.found = {name: block for name, block in self.found.items() if block not in self.removed}

    def check_page(self, one: _Open, answer: tuple[list[walks.Listed], int | None]) -> None:
        found, following = answer
        ids = [block.block_id for block in found]
        assert ids == sorted(set(ids))
        assert all(one.start <= block_id for block_id in ids)
        assert {(block.name, block.parent) for block in found} <= one.seen
        wanted = {
            block_id for block_id, (_, _, group) in one.always.items() if not group and one.start <= block_id < (following or 1000)
        }
        assert wanted <= set(ids)

    def check_listing(self, one: _Open, answer: Listing) -> None:
        told = set(names_of(answer))
        assert told <= one.seen
        assert {(name, parent) for name, parent, group in one.always.values() if not group} <= told
        for part in answer.parts:
            for name in [name for _, names in part.blocks() for name in names]:
                assert part.holders.get(name, 0) + (name in part.pinned) in one.holders[name]

    def check_flush(self, one: _Open, answer: int) -> None:
        assert self.manager.keeper.pool.free_among(list(one.always)) == []
        assert answer >= 0

    def teardown(self) -> None:
        while self.open:
            self.step(self.open[0])
        super().teardown()


class WindowedWalks(WalkMachine):
    policy: ClassVar[str] = "lru"
    windows: ClassVar[tuple[int | None, ...]] = (None, 6)
    num_blocks: ClassVar[int] = 24


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "MIN_RECALLED", 2)
    if request.cls is not None:
        monkeypatch.setattr(walks, "PIECE_BLOCKS", 3)
        monkeypatch.setattr(walks, "FLUSHED_BLOCKS", 2)


TestWalks = WalkMachine.TestCase
TestWindowedWalks = WindowedWalks.TestCase
TestWalks.settings = TestWindowedWalks.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
