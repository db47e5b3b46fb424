"""Block hashes."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256

import pytest

from kvist.kv.block import AT_ONCE, BlockHash, extend_hashes, hasher_of, make_key, prompt_hashes, root_hash

ROOT = root_hash(b"model", "bf16", 4, "")


def hashes_of(tokens: list[int], root: BlockHash = ROOT) -> list[BlockHash]:
    return prompt_hashes(root, tokens, 4)


def test_a_hash_is_the_same_on_every_machine() -> None:
    # SHA-256 of SHA-256(length-prefixed parts of the root) + tokens as little-endian 32-bit numbers.
    assert hashes_of([1, 2, 3, 2**31 - 1])[0].hex() == "d58a4b12ac517ab9ea98347a824a509ca36306767a5f2a21d60920d73f36efe0"
    tokens = b"".join(token.to_bytes(4, "little") for token in range(1000, 1012))
    assert hashes_of(list(range(1000, 1013))) == [sha256(ROOT + tokens[:end]).digest() for end in (16, 32, 48)]


def test_hashes_grow_by_whole_blocks_and_do_not_depend_on_how() -> None:
    at_once = hashes_of(list(range(12)))
    grown: list[BlockHash] = []
    hasher = hasher_of(ROOT)
    extend_hashes(grown, hasher, list(range(4)), 4)
    extend_hashes(grown, hasher, list(range(4, 12)), 4)
    extend_hashes(grown, hasher, [], 4)
    assert grown == at_once
    assert len(set(at_once)) == 3
    with pytest.raises(AssertionError):
        extend_hashes(grown, hasher, [1, 2, 3], 4)


def test_the_names_of_long_prompts_are_told_and_nothing_is_left_behind() -> None:
    tokens = [position % 1000 for position in range(4 * (2 * AT_ONCE + 1))]
    encoded = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert hashes_of(tokens) == [sha256(ROOT + encoded[:end]).digest() for end in range(16, len(encoded) + 1, 16)]
    tracemalloc.start()
    for length in range(20):
        assert len(hashes_of([0] * (16_000 + 4 * length))) == 4000 + length
    assert tracemalloc.get_traced_memory()[0] < 200_000
    tracemalloc.stop()


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    plain, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert plain[0] != other[0]
    assert plain[1] != other[1]


@pytest.mark.parametrize(
    "root",
    [
        root_hash(b"another model", "bf16", 4, ""),
        root_hash(b"model", "f16", 4, ""),
        root_hash(b"model", "bf16", 8, ""),
        root_hash(b"model", "bf16", 4, "tenant"),
        root_hash(b"modelbf16", "", 4, ""),
    ],
)
def test_a_hash_depends_on_everything_that_changes_the_bytes(root: BlockHash) -> None:
    assert hashes_of([1, 2, 3, 4], root) != hashes_of([1, 2, 3, 4])


def test_parts_of_a_key_do_not_run_together() -> None:
    assert make_key("ab", "c") != make_key("a", "bc")
    assert make_key("ab") == make_key(b"ab")
