"""Finds and last uses of prefixes: exact for each block, as long as no block is evicted before one behind it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.deciders import make_request, make_spec
from kvist.kv.block import BlockHash
from kvist.kv.manager import KVManager
from kvist.kv.walks import Listing, finish, flush, listing

SIZE = 4


class Drive:
    """Serves prompts one after the other, and knows what each block was found by."""

    def __init__(self, num_blocks: int, *windows: int | None, policy: str = "lru") -> None:
        spec = make_spec(*windows, block_size=SIZE)
        self.manager = KVManager(spec, num_blocks, watermark=0.0, eviction_policy=policy)
        self.count = 0
        self.finds: dict[BlockHash, int] = {}
        self.used_at: dict[BlockHash, float] = {}
        self.in_order = True
        """No block was evicted before one behind it."""

    def serve(self, blocks: Sequence[int]) -> int:
        """A prompt of these blocks and one token more. Returns how many blocks were found."""
        manager, prompt = self.manager, [token for block in blocks for token in [block] * SIZE] + [0]
        self.count += 1
        request = make_request(str(self.count), prompt, 1)
        manager.advance(float(self.count))
        manager.add(request)
        match = manager.match(request)
        manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        granted = manager.allocate(request, len(prompt) - match.num_tokens)
        assert granted
        self.forget_evicted()
        request.num_computed_tokens = len(prompt)
        _, names = manager.hashes_of(prompt, "")
        found = match.num_tokens // SIZE
        manager.commit(request)
        manager.free(request)
        for name in names[:found]:
            self.finds[name] += 1
        for name in names[found:]:
            self.finds.setdefault(name, 0)
        self.used_at |= dict.fromkeys(names, float(self.count))
        return found

    def listing(self) -> Listing:
        return finish(listing(self.manager.index, self.manager.keeper, None))

    def notes(self) -> dict[BlockHash, tuple[int, float]]:
        index = self.manager.index
        return {
            one.name(offset): (finds, used_at)
            for one in dict.fromkeys(index.stretches_of(0, index.num_blocks))
            if one is not None and not one.group
            for offset, finds, used_at in one.all_notes()
        }

    def flush(self) -> int:
        return finish(flush(self.manager.index, self.manager.keeper, None))

    def forget_evicted(self) -> None:
        listing = self.listing()
        stretches = [stretch for part in listing.parts for stretch in part.blocks()]
        kept = {name for _, names in stretches for name in names}
        self.in_order &= {before for before, _ in stretches} <= kept | listing.roots
        self.finds = {name: count for name, count in self.finds.items() if name in kept}

    def told(self) -> dict[BlockHash, tuple[int, float]]:
        """Of each block of the first group: finds and last use, added up from itself and all behind it."""
        listing, noted = self.listing(), self.notes()
        children: dict[BlockHash, list[BlockHash]] = {}
        for part in listing.parts:
            for before, names in part.blocks():
                for parent, name in zip((before, *names), names, strict=False):
                    children.setdefault(parent, []).append(name)
        told, tails = {}, {name for part in listing.parts for name in part.tails}
        for top in [name for following in children.values() for name in following if name not in tails]:
            behind = [top]
            for one in behind:
                behind += children.get(one, [])
            notes = [noted[name] for name in behind if name in noted]
            told[top] = sum(finds for finds, _ in notes), max((used_at for _, used_at in notes), default=-inf)
        return told

    def check(self) -> None:
        self.manager.check_invariants()
        told, known = self.told(), {name: (finds, self.used_at[name]) for name, finds in self.finds.items()}
        if self.in_order:
            assert told == known
        else:
            assert told.keys() == known.keys()
            assert all(told[name] <= known[name] for name in known), "lost, and never made up"


def test_a_find_counts_for_the_whole_prefix_and_moves_to_the_block_before() -> None:
    drive = Drive(9)
    assert [drive.serve([1, 2]), drive.serve([1, 2, 3, 4]), drive.serve([1, 2, 3, 4]), drive.serve([1, 2, 9])] == [0, 2, 4, 2]
    drive.check()
    _, names = drive.manager.hashes_of([token for block in (1, 2, 3, 4, 9) for token in [block] * SIZE], "")
    assert [drive.told()[name] for name in names[:4]] == [(3, 4.0), (3, 4.0), (1, 3.0), (1, 3.0)]
    notes = drive.notes()
    assert sorted(notes.values()) == [(0, 4.0), (1, 3.0), (2, 4.0)], "noted where hits and requests ended alone"
    assert drive.serve([5, 6, 7, 8]) == 0
    drive.check()
    assert [drive.told().get(name) for name in names[:4]] == [(3, 4.0), (3, 4.0), (1, 3.0), None]


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6)])
def test_what_is_found_of_conversations_is_counted(windows: tuple[int | None, ...]) -> None:
    drive = Drive(36 * len(windows), *windows)
    for turn in range(40):
        talk = turn * 7 % 5
        drive.serve([100, *range(10 * talk, 10 * talk + 1 + turn // 5)])
        drive.check()
    assert drive.manager.usage().evictions > 10
    assert sum(finds > 0 for finds in drive.finds.values()) > 10
    drive.flush()
    drive.forget_evicted()
    drive.check()
    assert not drive.notes()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40),
    policy=st.sampled_from(["lru", "density"]),
    flush=st.integers(0, 40),
)
@example([[0], [0], [0, 1, 1, 0], [0, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0] * 5], "density", 0)
def test_in_any_order_no_block_loses_a_find(prompts: list[list[int]], policy: str, flush: int) -> None:
    drive = Drive(9, policy=policy)
    for number, blocks in enumerate(prompts):
        drive.serve(blocks)
        drive.check()
        if number == flush:
            drive.flush()
            drive.forget_evicted()
            drive.check()


def test_a_preempted_request_finds_its_own_blocks_without_being_counted_again() -> None:
    manager = KVManager(make_spec(block_size=SIZE), 8, watermark=0.0)
    request = make_request("a", [1] * 9, 1)
    manager.add(request)
    manager.attach(request, manager.match(request))
    assert manager.allocate(request, 9)
    request.num_computed_tokens = 9
    manager.commit(request)
    manager.release(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    match = manager.match(request)
    assert match.num_tokens == 2 * SIZE
    manager.attach(request, match)
    (part,) = finish(listing(manager.index, manager.keeper, None)).parts
    assert (part.finds, part.notes) == ([0], [()])
    manager.check_invariants()
