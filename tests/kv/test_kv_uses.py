"""Finds and last uses of prefixes: exact for each block, as long as no block is evicted before one behind it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.deciders import make_request, make_spec
from kvist.kv.block import BlockHash
from kvist.kv.manager import KVManager

SIZE = 4


class Drive:
    """Serves prompts one after the other, and knows what each block was found by."""

    def __init__(self, num_blocks: int, *windows: int | None, policy: str = "lru") -> None:
        spec = make_spec(*windows, block_size=SIZE)
        self.manager = KVManager(spec, num_blocks, watermark=0.0, eviction_policy=policy)
        self.count = 0
        self.finds: dict[BlockHash, int] = {}
        self.used_at: dict[BlockHash, float] = {}

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

    def forget_evicted(self) -> None:
        kept = {entry.name for entry in self.manager.index.listing().entries if entry is not None and not entry.group}
        self.finds = {name: count for name, count in self.finds.items() if name in kept}

    def told(self) -> dict[BlockHash, tuple[int, float]]:
        """Of each block of the first group: finds and last use, added up from itself and all behind it."""
        index, uses = self.manager.index, self.manager.index.uses()
        listing = index.listing()
        entries = {
            block_id: entry
            for block_id, entry in enumerate(listing.entries)
            if entry is not None and entry.group == 0 and block_id not in listing.tails
        }
        children: dict[BlockHash, list[int]] = {}
        for block_id, entry in entries.items():
            children.setdefault(entry.parent, []).append(block_id)
        told = {}
        for block_id, entry in entries.items():
            behind = [block_id]
            for one in behind:
                behind += children.get(entries[one].name, [])
            told[entry.name] = uses.of(behind)
        return told

    def check(self) -> None:
        self.manager.check_invariants()
        assert self.told() == {name: (finds, self.used_at[name]) for name, finds in self.finds.items()}


def test_a_find_counts_for_the_whole_prefix_and_moves_to_the_block_before() -> None:
    drive = Drive(9)
    assert [drive.serve([1, 2]), drive.serve([1, 2, 3, 4]), drive.serve([1, 2, 3, 4]), drive.serve([1, 2, 9])] == [0, 2, 4, 2]
    drive.check()
    _, names = drive.manager.hashes_of([token for block in (1, 2, 3, 4, 9) for token in [block] * SIZE], "")
    assert [drive.told()[name] for name in names[:4]] == [(3, 4.0), (3, 4.0), (1, 3.0), (1, 3.0)]
    notes = drive.manager.index.uses().notes
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
    drive.manager.keeper.flush(None)
    drive.forget_evicted()
    drive.check()
    assert not drive.manager.index.uses().notes


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40),
    policy=st.sampled_from(["lru", "density"]),
    flush=st.integers(0, 40),
)
def test_in_any_order_no_block_loses_a_find(prompts: list[list[int]], policy: str, flush: int) -> None:
    drive = Drive(9, policy=policy)
    for number, blocks in enumerate(prompts):
        drive.serve(blocks)
        drive.check()
        if number == flush:
            drive.manager.keeper.flush(None)
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
    assert all(finds == 0 for finds, _ in manager.index.uses().notes.values())
    manager.check_invariants()
