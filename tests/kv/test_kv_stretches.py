"""Stretches against a dictionary: whatever is entered and taken out, all is found that is there, by every way of asking."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.kv import stretches
from kvist.kv.block import HASH_BYTES, BlockHash, name_at
from kvist.kv.stretches import MAX_STRETCH, Stretches, blocks_of

ROOT = BlockHash(bytes(HASH_BYTES))
NUM_BLOCKS = 60


def prefix(*branches: int) -> list[BlockHash]:
    """Names of a prefix whose n-th block is one of several that follow the one before."""
    names, name = [], ROOT
    for branch in branches:
        name = BlockHash(sha256(name + bytes([branch])).digest())
        names.append(name)
    return names


LONG = prefix(*[0] * 200)


def filled(*numbers: int) -> Stretches:
    """Block i of LONG has the id i."""
    index = Stretches(200, 1)
    for block in numbers:
        assert index.insert(0, ROOT, LONG, block, [block]) == [(block, block + 1)]
    index.check_invariants()
    return index


def sizes(index: Stretches) -> list[int]:
    return sorted(len(stretch.block_ids) for stretch in index)


def test_a_sequence_that_grows_block_by_block_takes_few_stretches() -> None:
    assert sizes(filled(*range(200))) == [8, 64, 64, 64]
    index = Stretches(200, 1)
    assert index.insert(0, ROOT, LONG, 0, range(200)) == [(0, 200)]
    assert sizes(index) == [8, 64, 64, 64]
    index.check_invariants()
    assert index.leading(0, LONG, 150).tolist() == list(range(150))


def test_a_block_from_the_middle_cuts_a_stretch_in_two_and_comes_back() -> None:
    index = filled(*range(10))
    assert index.remove([4]) == [(ROOT, LONG[4], [4])]
    assert (sizes(index), index.leading(0, LONG, 10).tolist()) == ([4, 5], [0, 1, 2, 3])
    assert index.every(0, LONG[:11]) == [0, 1, 2, 3, None, 5, 6, 7, 8, 9, None]
    assert index.insert(0, ROOT, LONG, 2, [20, 30, 40, 50, 60]) == [(4, 5)]
    assert (sizes(index), index.leading(0, LONG, 20).tolist()) == ([5, 5], [0, 1, 2, 3, 40, 5, 6, 7, 8, 9])
    index.check_invariants()


def test_ends_are_taken_out_in_one_piece_and_others_one_by_one() -> None:
    index = filled(*range(10))
    assert index.remove([9, 8, 7]) == [(ROOT, b"".join(LONG[7:10]), [7, 8, 9])]
    assert index.remove([0, 6, 5]) == [(ROOT, LONG[0], [0]), (ROOT, LONG[6], [6]), (ROOT, LONG[5], [5])]
    assert index.every(0, LONG[:8]) == [None, 1, 2, 3, 4, None, None, None]
    index.check_invariants()
    with pytest.raises(AssertionError, match="not indexed"):
        index.remove([1, 9])


def test_two_that_go_separate_ways_share_what_they_have_in_common() -> None:
    index = Stretches(20, 1)
    one, other = prefix(0, 0, 0, 0), prefix(0, 0, 1, 1)
    assert index.insert(0, ROOT, one, 0, [0, 1, 2, 3]) == [(0, 4)]
    assert index.insert(0, ROOT, other, 0, [10, 11, 12, 13]) == [(2, 4)]
    assert index.leading(0, other, 4).tolist() == [0, 1, 12, 13]
    parents = {block_id: parent for copy in index.copies() for block_id, _, parent in blocks_of(copy)}
    assert parents == {0: ROOT, 1: one[0], 2: one[1], 3: one[2], 12: one[1], 13: other[2]}
    assert index.find(0, other, 1) == index.find(0, one, 1) == (index.of(1), 1)
    assert index.find(0, prefix(0, 0, 2), 2) is None


class Machine(RuleBasedStateMachine):
    """Two groups; prefixes branch in two. `blocks` is what there should be: (group, name) -> block id."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Stretches(NUM_BLOCKS, 2)
        self.blocks: dict[tuple[int, BlockHash], int] = {}
        self.prefixes: list[list[BlockHash]] = []

    def free(self) -> list[int]:
        return sorted(set(range(NUM_BLOCKS)) - set(self.blocks.values()))

    @rule(
        group=st.integers(0, 1),
        branches=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        start=st.integers(0, 9),
        data=st.data(),
    )
    def enter(self, group: int, branches: list[int], start: int, data: st.DataObject) -> None:
        names = prefix(*branches)
        start = min(start, len(names) - 1)
        self.prefixes = [*self.prefixes[-4:], names]
        free = self.free()[: len(names) - start]
        if not free:
            return
        ids = data.draw(st.permutations(free))
        wanted = [block for block in range(start, start + len(ids)) if (group, names[block]) not in self.blocks]
        new = self.index.insert(group, ROOT, names, start, ids)
        assert [block for first, end in new for block in range(first, end)] == wanted
        for block in wanted:
            self.blocks[group, names[block]] = ids[block - start]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), ends=st.booleans())
    def take_out(self, data: st.DataObject, ends: bool) -> None:
        """The ends of some stretches, or any blocks."""
        if ends:
            chosen = data.draw(st.lists(st.sampled_from(list(self.index)), min_size=1, max_size=3, unique=True))
            ids = [id_ for one in chosen for id_ in one.block_ids[-data.draw(st.integers(1, len(one.block_ids))) :][::-1]]
            ids = ids if data.draw(st.booleans()) else ids[::2] + ids[1::2]
        else:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.blocks.values())), min_size=1, max_size=5, unique=True))
        names = {block_id: key for key, block_id in self.blocks.items()}
        told = {
            block_id: name_at(piece.names, place)
            for piece in self.index.remove(ids)
            for place, block_id in enumerate(piece.block_ids)
        }
        assert told == {block_id: names[block_id][1] for block_id in ids}
        for block_id in ids:
            del self.blocks[names[block_id]]

    @invariant()
    def all_is_found(self) -> None:
        self.index.check_invariants()
        for block_id in range(NUM_BLOCKS):
            assert (self.index.of(block_id) is not None) == (block_id in self.blocks.values())
        for group in range(2):
            for names in self.prefixes:
                want = [self.blocks.get((group, name)) for name in names]
                assert self.index.every(group, names) == want
                until = want.index(None) if None in want else len(want)
                assert self.index.leading(group, names, len(names)).tolist() == want[:until]
                for block, block_id in enumerate(want):
                    found = self.index.find(group, names, block)
                    assert (None if found is None else found[0].block_ids[found[1]]) == block_id
        listed = {(copy.group, name): block_id for copy in self.index.copies() for block_id, name, _ in blocks_of(copy)}
        assert listed == self.blocks


@pytest.mark.parametrize("limit", [3, MAX_STRETCH])
def test_stretches_machine(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "MAX_STRETCH", limit)
    machine = type("Limited", (Machine,), {}).TestCase()
    machine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    machine.runTest()
