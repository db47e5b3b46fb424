"""What is remembered of evicted blocks."""

from __future__ import annotations

from hashlib import sha256

from kvist.kv.block import BlockHash
from kvist.kv.ghosts import Ghosts

HASHES = [BlockHash(sha256(bytes([number])).digest()) for number in range(200)]


def test_what_was_put_is_found_with_memo_and_time() -> None:
    ghosts = Ghosts(4096)
    assert ghosts.memos(HASHES[:2]) == [None, None]
    ghosts.put(HASHES[:3], [7, 0, 2**32 - 1], 12.5)
    assert ghosts.memos(HASHES[:4]) == [7, 0, 2**32 - 1, None]
    assert (ghosts.evicted_at(HASHES[1]), ghosts.evicted_at(HASHES[3])) == (12.5, None)
    ghosts.put([HASHES[0]], [8], 13.0)
    assert (ghosts.memos([HASHES[0]]), ghosts.evicted_at(HASHES[0])) == ([8], 13.0)
    assert ghosts.memos([]) == []


def test_memory_is_bounded_and_the_newest_is_always_known() -> None:
    ghosts = Ghosts(16)
    for number, block_hash in enumerate(HASHES):
        ghosts.put([block_hash], [number], float(number))
        assert ghosts.memos([block_hash]) == [number]
    known = [memo for memo in ghosts.memos(HASHES) if memo is not None]
    assert 1 <= len(known) <= 16
    assert known == [number for number, memo in enumerate(ghosts.memos(HASHES)) if memo is not None]
