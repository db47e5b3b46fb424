"""What is remembered of evicted blocks."""

from __future__ import annotations

from hashlib import sha256

from kvist.kv.block import BlockHash
from kvist.kv.ghosts import MEMO_BITS, STRIDE, TICK_BITS, TICKS_PER_SECOND, Ghosts, num_places

HASHES = [BlockHash(sha256(bytes([number])).digest()) for number in range(200)]


def test_what_was_put_is_found_with_memo_and_time() -> None:
    ghosts = Ghosts(64)
    assert ghosts.memos(HASHES[:2]) == [None, None]
    ghosts.put(b"".join(HASHES[:3]), [7, 0, 2**MEMO_BITS - 1], 12.5)
    assert ghosts.memos(HASHES[:4]) == [7, 0, 2**MEMO_BITS - 1, None]
    assert (ghosts.evicted_ago([HASHES[1]], 13.0), ghosts.evicted_ago([HASHES[3]], 13.0)) == (0.5, None)
    ghosts.put(HASHES[0], [8], 13.1)
    assert (ghosts.memos([HASHES[0]]), ghosts.evicted_ago([HASHES[0]], 13.1)) == ([8], 0.0)
    assert ghosts.memos([]) == []


def test_time_begins_anew_after_days() -> None:
    ghosts, days = Ghosts(64), 2**TICK_BITS / TICKS_PER_SECOND
    for start in (days - 10, 5 * days - 10):
        ghosts.put(b"".join(HASHES[:9]), [1] * 9, start)
        assert {ghosts.evicted_ago([name], start + 1000.25) for name in HASHES[:9]} <= {1000.25, None}
        assert ghosts.evicted_ago([HASHES[8]], start + 1000.25) == 1000.25


def test_the_table_is_about_as_large_as_asked() -> None:
    assert [num_places(wanted) for wanted in (1, 2, 3, 5, 6, 40_000, 4_000_000)] == [1, 2, 4, 4, 8, 32_768, 4_194_304]
    assert all(2 * wanted <= 3 * num_places(wanted) <= 4 * wanted for wanted in range(2, 500))


def test_a_remembered_sequence_is_told_whole_and_an_unknown_one_by_some_of_its_blocks() -> None:
    ghosts = Ghosts(1 << 16)
    ghosts.put(b"".join(HASHES[:100]), list(range(100)), 1.0)
    assert ghosts.memos(HASHES[:120]) == [*range(100), *[None] * 20]
    assert ghosts.memos(HASHES[96:120]) == [96, 97, 98, 99, *[None] * 20]
    assert ghosts.memos(HASHES[98:120]) == [98, 99, *[None] * 20]
    assert ghosts.memos(HASHES[100:]) == [None] * 100


def test_the_latest_of_a_large_table_are_told_at_once() -> None:
    ghosts = Ghosts(1 << 16)
    ghosts.put(b"".join(HASHES[:10]), [3] * 10, 1.0)
    assert ghosts.evicted_ago([HASHES[9]], 2.0) == 1.0
    ghosts.put(b"".join(HASHES[10:20]), [4] * 10, 1.0)
    assert ghosts.memos(HASHES[:21]) == [*[3] * 10, *[4] * 10, None]


def test_memory_is_bounded_and_the_newest_is_always_known() -> None:
    ghosts = Ghosts(16)
    for number, block_hash in enumerate(HASHES):
        ghosts.put(block_hash, [number], float(number))
        assert ghosts.memos([block_hash]) == [number]
    known = [memo for memo in ghosts.memos(HASHES) if memo is not None]
    assert 1 <= len(known) <= 16
    assert known == [number for number, memo in enumerate(ghosts.memos(HASHES)) if memo is not None]


def test_some_of_many_are_put_from_the_first_on() -> None:
    ghosts = Ghosts(1 << 16)
    ghosts.put_some(b"".join(HASHES[: STRIDE + 1]), 3.0)
    times = [ghosts.evicted_ago([block_hash], 4.0) for block_hash in HASHES[: STRIDE + 1]]
    assert times == [1.0, *[None] * (STRIDE - 1), 1.0]
    ghosts.put_some(HASHES[20], 3.5)
    assert ghosts.evicted_ago([HASHES[20]], 4.0) == 0.5
    assert ghosts.evicted_ago(HASHES[1 : STRIDE + 1], 4.0) == 1.0, "a miss looks so far"
    assert ghosts.evicted_ago([], 4.0) is None
