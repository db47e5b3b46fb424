"""Stretches against a dictionary: whatever is entered and taken out, all is found that is there, by every way of asking."""

from __future__ import annotations

from array import array
from hashlib import sha256
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.kv import stretches
from kvist.kv.block import HASH_BYTES, TOKEN_BYTES, BlockHash, name_at
from kvist.kv.stretches import MAX_STRETCH, MIN_RECALLED, Stretches

ROOT = BlockHash(bytes(HASH_BYTES))
NUM_BLOCKS = 60


def prefix(*branches: int) -> list[BlockHash]:
    """Names of a prefix whose n-th block, of one token, is one of several that follow the one before."""
    names, name = [], ROOT
    for branch in branches:
        name = BlockHash(sha256(name + bytes([branch])).digest())
        names.append(name)
    return names


LONG = prefix(*[0] * 200)
ZEROS = array("I", [0] * 200)


def filled(*numbers: int) -> Stretches:
    """Block i of LONG has the id i."""
    index = Stretches(200, 1, TOKEN_BYTES, 0)
    for block in numbers:
        assert index.insert(0, ROOT, LONG, block, [block], ZEROS) == [(block, block + 1)]
    index.check_invariants()
    return index


def recall(index: Stretches, root: BlockHash, tokens: bytes, group: int = 0) -> list[BlockHash]:
    names, block_ids = index.recall(root, array("I", tokens), len(tokens) // TOKEN_BYTES)
    assert block_ids == index.leading(group, names, len(names))
    return names


def sizes(index: Stretches) -> list[int]:
    return sorted(stretch.num_blocks for stretch in index)


def test_a_sequence_that_grows_block_by_block_takes_few_stretches() -> None:
    assert sizes(filled(*range(200))) == [8, 64, 64, 64]
    index = Stretches(200, 1, TOKEN_BYTES, 0)
    assert index.insert(0, ROOT, LONG, 0, range(200), ZEROS) == [(0, 200)]
    assert sizes(index) == [8, 64, 64, 64]
    index.check_invariants()
    assert index.leading(0, LONG, 150).tolist() == list(range(150))


def test_a_block_from_the_middle_cuts_a_stretch_in_two_and_comes_back() -> None:
    index = filled(*range(10))
    assert index.remove([4]) == [(ROOT, LONG[4], [4], 0)]
    assert (sizes(index), index.leading(0, LONG, 10).tolist()) == ([4, 5], [0, 1, 2, 3])
    assert index.every(0, LONG[:11]) == [0, 1, 2, 3, None, 5, 6, 7, 8, 9, None]
    assert index.insert(0, ROOT, LONG, 2, [20, 30, 40, 50, 60], ZEROS) == [(4, 5)]
    assert (sizes(index), index.leading(0, LONG, 20).tolist()) == ([5, 5], [0, 1, 2, 3, 40, 5, 6, 7, 8, 9])
    index.check_invariants()


def test_ends_are_taken_out_in_one_piece_and_so_is_what_follows_each_other() -> None:
    index = filled(*range(10))
    assert index.remove([9, 8, 7]) == [(ROOT, b"".join(LONG[7:10]), [7, 8, 9], 0)]
    assert index.remove([0, 6, 5]) == [(ROOT, LONG[5] + LONG[6], [5, 6], 0), (ROOT, LONG[0], [0], 0)]
    assert index.every(0, LONG[:8]) == [None, 1, 2, 3, 4, None, None, None]
    index.check_invariants()
    with pytest.raises(AssertionError, match="not indexed"):
        index.remove([1, 9])


def test_two_that_go_separate_ways_share_what_they_have_in_common() -> None:
    index = Stretches(20, 1, TOKEN_BYTES, 0)
    one, other = prefix(0, 0, 0, 0), prefix(0, 0, 1, 1)
    assert index.insert(0, ROOT, one, 0, [0, 1, 2, 3], array("I", [0, 0, 0, 0])) == [(0, 4)]
    assert index.insert(0, ROOT, other, 0, [10, 11, 12, 13], array("I", [0, 0, 1, 1])) == [(2, 4)]
    assert index.leading(0, other, 4).tolist() == [0, 1, 12, 13]
    assert {each.block_ids()[0]: each.parent for each in index} == {0: ROOT, 12: one[1]}
    assert index.of_all(10, 14) == [None, None, index.of(12), index.of(12)]
    assert index.find(0, other, 1) == index.find(0, one, 1) == (index.of(1), 1)
    assert index.find(0, prefix(0, 0, 2), 2) is None


def test_what_is_noted_of_a_block_stays_with_it_and_goes_to_the_one_before_in_the_end() -> None:
    def noted() -> dict[int, tuple[int, float]]:
        index.check_invariants()
        return {one.block_ids()[offset]: (finds, at) for one in index for offset, finds, at in one.all_notes()}

    index, other, tokens = filled(*range(10)), prefix(0, 0, 0, 1, 1), array("I", [0, 0, 0, 1, 1])
    index.note(0, LONG, 9, 9, 3, 5.0)
    index.note(0, LONG, 2, 2, 1, 4.0)
    index.remove([5])
    assert noted() == {2: (1, 4.0), 9: (3, 5.0)}, "each part of a stretch keeps its own"
    index.insert(0, ROOT, other, 3, [20, 21], tokens)
    index.note(0, other, 4, 21, 2, 6.0)
    index.remove([21, 20])
    assert noted() == {2: (3, 6.0), 9: (3, 5.0)}, "to where it forked off, not to the last of what is before"
    index.note(0, LONG, 4, 4, 1, 7.0)
    index.insert(0, ROOT, LONG, 5, [5], ZEROS)
    assert noted() == {2: (3, 6.0), 4: (1, 7.0), 9: (3, 5.0)}, "of a last block that others follow"
    index.remove([9, 8, 7, 6])
    index.remove([4])
    assert noted() == {2: (3, 6.0), 3: (1, 7.0), 5: (3, 5.0)}
    index.remove([5])
    assert noted() == {0: (3, 5.0), 2: (3, 6.0), 3: (1, 7.0)}, "what it was behind is gone, but its beginning is not"


def test_what_is_noted_passes_over_stretches_that_are_gone_already() -> None:
    index = filled(*range(10))
    index.remove([3])
    index.remove([6])
    index.note(0, LONG, 9, 9, 3, 5.0)
    index.remove([5, 4])
    index.remove([9, 8, 7])
    (left,) = index
    assert (left.block_ids().tolist(), left.all_notes()) == ([0, 1, 2], ((0, 3, 5.0),))
    index.check_invariants()


def test_an_older_use_of_what_is_gone_makes_no_later_one_earlier() -> None:
    index = filled(*range(MAX_STRETCH + 2))
    last = MAX_STRETCH - 1
    index.note(0, LONG, last + 2, last + 2, 1, 3.0)
    index.note(0, LONG, last, last, 1, 5.0)
    index.remove([last + 2, last + 1])
    (left,) = index
    assert left.all_notes() == ((last, 2, 5.0),)


def test_a_block_of_another_group_is_not_taken_for_the_one_of_its_name() -> None:
    """Whoever names one that it has let go names any."""
    index = Stretches(20, 2, TOKEN_BYTES, None)
    for group, ids in enumerate(([0, 1], [10, 11])):
        assert index.insert(group, ROOT, LONG, 0, ids, ZEROS) == [(0, 2)]
    assert index.find_near(0, LONG, 1, 11) == (index.of(1), 1)
    index.note(0, LONG, 1, 11, 2, 3.0)
    assert [list(each.all_notes()) for each in index] == [[(1, 2, 3.0)], []]


def test_names_are_told_from_tokens_as_far_as_these_are_known() -> None:
    index = filled(*range(200))
    tokens = ZEROS.tobytes()
    assert recall(index, ROOT, tokens) == LONG
    assert recall(index, ROOT, tokens[: 70 * TOKEN_BYTES]) == LONG[:70]
    assert recall(index, ROOT, array("I", [*[0] * 100, 1, 0, 0]).tobytes()) == LONG[:100]
    assert recall(index, LONG[0], tokens) == [], "another root"
    assert recall(index, ROOT, b"") == []
    ones = [*[0] * 100, *[1] * MIN_RECALLED]
    other = prefix(*ones)
    index.remove([*range(199, 149, -1)])
    assert index.insert(0, ROOT, other, 100, [*range(190, 190 + MIN_RECALLED)], array("I", ones)) == [(100, len(ones))]
    assert recall(index, ROOT, array("I", [*[0] * 100, 1, 1, 1, 0]).tobytes()) == other[:103], "behind the middle of another"
    assert recall(index, ROOT, tokens) == LONG[:150]
    index.remove([*range(149, 66, -1)])
    assert recall(index, ROOT, tokens) == LONG[:67]
    assert recall(index, ROOT, array("I", [*[0] * 100, 1]).tobytes()) == LONG[:67], "what is before it is gone"
    index.remove([*range(66, -1, -1)])
    assert recall(index, ROOT, tokens) == []
    index.check_invariants()


def test_another_root_of_one_checksum_is_told_nothing() -> None:
    """A checksum finds what may be the same beginning; the name before it says whether it is."""
    twin = BlockHash((int.from_bytes(ROOT, "big") ^ 0x410671DB01).to_bytes(HASH_BYTES, "big"))
    assert twin != ROOT
    assert crc32(twin) == crc32(ROOT)
    index = filled(*range(MIN_RECALLED))
    assert recall(index, ROOT, ZEROS.tobytes()) == LONG[:MIN_RECALLED]
    assert recall(index, twin, ZEROS.tobytes()) == []


def test_names_behind_a_hole_that_was_filled_again_are_told_from_tokens() -> None:
    index = filled(*range(20))
    index.remove([9])
    assert recall(index, ROOT, ZEROS.tobytes()) == LONG[:9]
    assert index.insert(0, ROOT, LONG, 9, [9], ZEROS) == [(9, 10)]
    assert recall(index, ROOT, ZEROS.tobytes()) == LONG[:20]
    index.check_invariants()


def test_short_stretches_keep_no_tokens() -> None:
    index, few = Stretches(20, 1, TOKEN_BYTES, 0), MIN_RECALLED - 1
    index.insert(0, ROOT, LONG, 0, range(few), ZEROS)
    assert recall(index, ROOT, ZEROS.tobytes()) == []
    index.insert(0, ROOT, LONG, few, [few], ZEROS)
    assert recall(index, ROOT, ZEROS.tobytes()) == LONG[:MIN_RECALLED]


class Machine(RuleBasedStateMachine):
    """Two groups; prefixes branch in two. `blocks` is what there should be: (group, name) -> block id."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Stretches(NUM_BLOCKS, 2, TOKEN_BYTES, 1)
        self.blocks: dict[tuple[int, BlockHash], int] = {}
        self.prefixes: list[tuple[list[BlockHash], bytes]] = []
        self.alone: dict[BlockHash, list[BlockHash]] = {}
        """By the name of a block that nothing follows what is before it, here or not."""

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
        self.prefixes = [*self.prefixes[-4:], (names, array("I", branches).tobytes())]
        free = self.free()[: len(names) - start]
        if not free:
            return
        ids = data.draw(st.permutations(free))
        wanted = [block for block in range(start, start + len(ids)) if (group, names[block]) not in self.blocks]
        new = self.index.insert(group, ROOT, names, start, ids, array("I", branches))
        assert [block for first, end in new for block in range(first, end)] == wanted
        for block in wanted:
            self.blocks[group, names[block]] = ids[block - start]

    @precondition(lambda self: self.prefixes)
    @rule(group=st.integers(0, 1), data=st.data())
    def enter_alone(self, group: int, data: st.DataObject) -> None:
        names = data.draw(st.sampled_from(self.prefixes))[0]
        before = names[: data.draw(st.integers(0, len(names)))]
        parent = before[-1] if before else ROOT
        name = BlockHash(sha256(parent + b"the rest").digest())
        free = self.free()
        if free:
            self.alone[name] = before
            assert self.index.insert_alone(group, ROOT, parent, name, free[0]) == ((group, name) not in self.blocks)
            self.blocks.setdefault((group, name), free[0])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), ends=st.booleans())
    def take_out(self, data: st.DataObject, ends: bool) -> None:
        """The ends of some stretches, or any blocks."""
        if ends:
            chosen = data.draw(st.lists(st.sampled_from(list(self.index)), min_size=1, max_size=3, unique=True))
            ids = [id_ for one in chosen for id_ in one.block_ids()[-data.draw(st.integers(1, one.num_blocks)) :][::-1]]
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
            for names, tokens in self.prefixes:
                recalled = recall(self.index, ROOT, tokens, group=1)
                assert recalled == names[: len(recalled)]
                assert all((1, name) in self.blocks for name in recalled)
                want = [self.blocks.get((group, name)) for name in names]
                assert self.index.every(group, names) == want
                until = want.index(None) if None in want else len(want)
                assert self.index.leading(group, names, len(names)).tolist() == want[:until]
                for block, block_id in enumerate(want):
                    found = self.index.find(group, names, block)
                    assert (None if found is None else found[0].block_ids()[found[1]]) == block_id
            for name, before in self.alone.items():
                found, want_alone = self.index.find(group, [*before, name], len(before)), self.blocks.get((group, name))
                assert (None if found is None else found[0].block_ids()[found[1]]) == want_alone
                assert self.index.alone(group, name) == want_alone
        listed = {(one.group, one.name(place)): id_ for one in self.index for place, id_ in enumerate(one.block_ids())}
        assert listed == self.blocks


@pytest.mark.parametrize("limit", [3, MAX_STRETCH])
def test_stretches_machine(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "MAX_STRETCH", limit)
    monkeypatch.setattr(stretches, "MIN_RECALLED", 2)
    machine = type("Limited", (Machine,), {}).TestCase()
    machine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    machine.runTest()
