"""The prefix index: exact hits, and the longest common length against trying all."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.kv.block import BlockHash
from kvist.kv.prefix import PrefixIndex

HASHES = [BlockHash(bytes([number]) * 32) for number in range(12)]
ROOT = BlockHash(bytes([255]) * 32)
TOKENS = array("I", range(48))


def filled(windows: tuple[int | None, ...], present: list[set[int]], size: int = 4) -> PrefixIndex:
    """An index whose group g has the blocks `present[g]`; block i of group g has id 12 g + i."""
    index = PrefixIndex(12 * len(windows), windows, size)
    for group, blocks in enumerate(present):
        for block in sorted(blocks):
            assert index.insert(group, ROOT, HASHES, block, [12 * group + block], TOKENS)[0]
    return index


def test_a_full_group_needs_every_block() -> None:
    index = filled((None,), [{0, 1, 2, 4}])
    match = index.match(HASHES, 6)
    assert match.num_tokens == 12
    assert match.block_ids == (array("I", [0, 1, 2]),)
    assert match.first_blocks == (0,)
    assert index.match(HASHES, 2).num_tokens == 8
    assert index.match(HASHES, 0).num_tokens == 0


def test_a_windowed_group_needs_only_its_last_window() -> None:
    # A row at position 20 with a window of 8 reads 13 .. 20: of the hit, blocks 3 and 4.
    index = filled((8,), [{3, 4}])
    match = index.match(HASHES, 5)
    assert match.num_tokens == 20
    assert match.block_ids == (array("I", [0, 0, 0, 3, 4]),)
    assert match.first_blocks == (3,)
    # A window of 9 reads 12 .. 20 and still two blocks; one of 10 reads 11 .. 20, and so a third.
    assert filled((9,), [{3, 4}]).match(HASHES, 5).num_tokens == 20
    assert filled((10,), [{3, 4}]).match(HASHES, 5).num_tokens == 0
    # A window of one token reads nothing that is cached.
    assert filled((1,), [set()]).match(HASHES, 5).num_tokens == 20


def test_a_hit_is_valid_in_every_group() -> None:
    index = filled((None, 8), [{0, 1, 2, 3, 4}, {1, 2, 4}])
    match = index.match(HASHES, 6)
    assert match.num_tokens == 12
    assert match.block_ids == (array("I", [0, 1, 2]), array("i", [0, 13, 14]))
    assert match.first_blocks == (0, 1)


def test_a_watch_ends_with_who_watches() -> None:
    index = filled((None,), [{0, 1}])
    one: dict[int, None] = {}
    other: dict[int, None] = {}
    with index.watch(one):
        with index.watch(other):
            index.replace(7, 0)
        index.replace(8, 1)
    index.replace(9, 7)
    assert (list(one), list(other)) == ([7, 8], [7])


def test_the_first_of_two_blocks_with_one_name_is_kept() -> None:
    index = PrefixIndex(4, (None,), 4)
    other = [HASHES[0], HASHES[2]]
    assert index.insert(0, ROOT, HASHES, 0, [2, 1], TOKENS) == ([2, 1], HASHES[:2])
    assert index.insert(0, ROOT, other, 0, [3, 0], TOKENS) == ([0], [HASHES[2]])
    assert [index.hash_of(block_id) for block_id in (1, 0)] == [HASHES[1], HASHES[2]]
    assert [stretch and stretch.parent for stretch in index.stretches_of(0, 4)] == [HASHES[0], ROOT, ROOT, None]
    assert (index.get(0, HASHES, 0), index.hash_of(3), index.count(ROOT), index.count(HASHES[0])) == (2, None, 3, 0)
    assert index.remove([2, 0]) == [(ROOT, HASHES[0], [2], 0), (ROOT, HASHES[2], [0], 0)]
    assert (index.get(0, HASHES, 0), index.get(0, HASHES, 1), index.count()) == (None, 1, 1)
    with pytest.raises(AssertionError, match="not indexed"):
        index.remove([2])
    index.check_invariants()


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 30)), st.sets(st.integers(0, 11)), st.booleans()), min_size=1, max_size=5
    ),
    st.integers(0, 12),
)
def test_the_hit_is_the_longest(groups: list[tuple[int | None, set[int], bool]], limit: int) -> None:
    windows = tuple(window for window, _, _ in groups)
    present = [set(range(12)) - blocks if inverted else blocks for _, blocks, inverted in groups]
    index = filled(windows, present)

    def valid(length: int) -> bool:
        needed = [0 if window is None else max(0, 4 * length - window + 1) // 4 for window in windows]
        return all(set(range(first, length)) <= blocks for first, blocks in zip(needed, present, strict=True))

    best = max(length for length in range(limit + 1) if valid(length))
    match = index.match(HASHES, limit)
    assert match.num_tokens == 4 * best
    for group, (ids, first) in enumerate(zip(match.block_ids, match.first_blocks, strict=True)):
        assert list(ids) == [0] * first + [12 * group + block for block in range(first, best)]
    index.check_invariants()
