"""The names of a request's blocks as far as its tokens are known, and what any KV memory that shares prefixes tells from them.

It knows no pool and no index. Invariant: a record's `hashes` are those of its request's first whole blocks, and `hasher` has taken
in the root and the tokens of exactly these, so that each token is hashed once in the life of a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvist.kv.block import BlockHash, Hasher, extend_hashes, hasher_of
from kvist.kv.prefix import PrefixMatch
from kvist.request import PrefixMiss, Request


@dataclass(slots=True)
class Record:
    """What a memory knows of one open request."""

    root: BlockHash
    tables: tuple[array[int], ...]
    hashes: list[BlockHash] = field(default_factory=list)
    hasher: Hasher = field(init=False)
    num_found: int = 0
    """Leading blocks that the request's last hit covered."""
    num_committed: int = 0
    """Leading blocks that have been offered to the index, or came from it."""

    def __post_init__(self) -> None:
        self.hasher = hasher_of(self.root)

    def hash_up_to(self, request: Request, num_blocks: int, block_size: int) -> None:
        """Know the names of the first `num_blocks` blocks at least."""
        start = len(self.hashes)
        if num_blocks > start:
            extend_hashes(self.hashes, self.hasher, request.token_ids(start * block_size, num_blocks * block_size), block_size)


def no_match(num_groups: int) -> PrefixMatch:
    return PrefixMatch(0, tuple(array("i") for _ in range(num_groups)), (0,) * num_groups)


def most_blocks(request: Request, block_size: int) -> int:
    """What a hit can cover: at least the last token is left to compute."""
    return (request.num_tokens - 1) // block_size


def is_being_computed(
    records: Mapping[str, Record], request: Request, match: PrefixMatch, running: Iterable[Request], block_size: int
) -> bool:
    """Whether one of the `running` requests has yet to commit the block by which the hit `match` would be longer."""
    record, block = records[request.request_id], match.num_tokens // block_size
    if block >= most_blocks(request, block_size):
        return False
    for other in running:
        theirs = records[other.request_id]
        if theirs.root == record.root and theirs.num_committed <= block < other.num_tokens // block_size:
            theirs.hash_up_to(other, block + 1, block_size)
            if theirs.hashes[block] == record.hashes[block]:
                return True
    return False


def plain_miss(request: Request, match: PrefixMatch, block_size: int, *, caching: bool) -> PrefixMiss | None:
    """Why `match` covers no more of the prompt, where that follows from the request alone."""
    if not caching:
        return PrefixMiss("caching_off", 0)
    if request.wants_prompt_logprobs:
        return PrefixMiss("prompt_logprobs", 0)
    if match.num_tokens >= (request.num_prompt_tokens - 1) // block_size * block_size:
        return PrefixMiss("partial_block", match.num_tokens)
    return None
