"""The names of a request's blocks as far as its tokens are known; what is told from them is `kv/lookup.py`.

It knows no pool and no index. Invariant: a record's `hashes` are those of its request's first whole blocks, and `hasher` has taken
in the root and the tokens of exactly these, so that each token is hashed once in the life of a request.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvist.kv.block import BlockHash, Hasher, Tail, extend_hashes, hasher_of, tail_hash
from kvist.kv.prefix import PrefixMatch
from kvist.request import Request


@dataclass(slots=True)
class Record:
    """What a memory knows of one open request."""

    root: BlockHash
    tables: tuple[array[int], ...]
    hashes: list[BlockHash] = field(default_factory=list)
    hasher: Hasher = field(init=False)
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """The first of the request's: at least those of the blocks in `hashes`."""
    num_found: int = 0
    """Leading blocks that the request's last hit covered."""
    num_committed: int = 0
    """Leading blocks that have been offered to the index, or came from it."""
    trail: int = 0
    """Its number in `Trails`."""

    def __post_init__(self) -> None:
        self.hasher = hasher_of(self.root)

    def hash_up_to(self, request: Request, num_blocks: int, block_size: int) -> None:
        """Know the names of the first `num_blocks` blocks at least."""
        start, stop = len(self.hashes) * block_size, num_blocks * block_size
        if stop > start:
            if not self.tokens:
                self.tokens = array("I", request.prompt_token_ids)
            if len(self.tokens) < stop:
                self.tokens.extend(array("I", request.token_ids(len(self.tokens), stop)))
            extend_hashes(self.hashes, self.hasher, self.tokens[start:stop], block_size)

    def tail(self, request: Request, block_size: int) -> Tail | None:
        """What the request has computed of a block that is not full, if it has committed all before that. Less than half of one is
        worth less than what its block would take the place of."""
        block, rest = divmod(request.num_computed_tokens, block_size)
        if 2 * rest < block_size or block != self.num_committed:
            return None
        start, hasher = block * block_size, self.hasher
        if len(self.hashes) > block:
            hasher = hasher_of(self.root)
            extend_hashes([], hasher, self.tokens[:start], block_size)
        name = tail_hash(hasher, request.token_ids(start, start + rest))
        return Tail(name, self.hashes[block - 1] if block else self.root, block, rest)

    def all_tokens(self, request: Request) -> array[int]:
        """Of a request that has ended."""
        if len(self.tokens) < request.num_tokens:
            self.tokens.extend(array("I", request.token_ids(len(self.tokens), request.num_tokens)))
        return self.tokens


def no_match(num_groups: int) -> PrefixMatch:
    return PrefixMatch(0, empty_tables(num_groups), (0,) * num_groups)


def empty_tables(num_groups: int) -> tuple[array[int], ...]:
    return (array("i"),) if num_groups == 1 else tuple(array("i") for _ in range(num_groups))
