"""The names of a request's blocks as far as its tokens are known; what is told from them is `kv/lookup.py`.

It knows no pool. Invariants: a record's `hashes` are those of its request's first whole blocks, and `hasher` has taken in the root
and the tokens of the first `num_hashed` of these; so each token is hashed once at most in the life of a request, and what an index
recalls by its tokens is not, unless more follows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvist.kv.block import BlockHash, Hasher, Tail, encode_tokens, extend_hashes, hasher_of, prompt_hashes, tail_hash
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.request import Request


@dataclass(slots=True)
class Record:
    """What a memory knows of one open request."""

    root: BlockHash
    tables: tuple[array[int], ...]
    hashes: list[BlockHash] = field(default_factory=list)
    hasher: Hasher | None = None
    num_hashed: int = 0
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """The first of the request's: at least those of the blocks in `hashes`."""
    num_committed: int = 0
    """Leading blocks that have been offered to the index, or came from it."""
    trail: int = 0
    """Its number in `Trails`."""

    def recall(self, request: Request, num_blocks: int, index: PrefixIndex) -> array[int] | None:
        """Know the names of the first `num_blocks` blocks at least; those that `index` has are taken from there, and the blocks
        told."""
        found = None
        if not self.hashes and num_blocks:
            self._take_tokens(request, num_blocks * index.block_size)
            names, found = index.recall(self.root, self.tokens, num_blocks)
            self.hashes += names
        if num_blocks > len(self.hashes):
            self.hash_up_to(request, num_blocks, index.block_size)
        return found

    def hash_up_to(self, request: Request, num_blocks: int, block_size: int) -> None:
        """Know the names of the first `num_blocks` blocks at least."""
        known = len(self.hashes)
        if num_blocks > known:
            self._take_tokens(request, num_blocks * block_size)
            tokens = self.tokens[known * block_size : num_blocks * block_size]
            extend_hashes(self.hashes, self._hasher_at(known, block_size), tokens, block_size)
            self.num_hashed = num_blocks

    def _take_tokens(self, request: Request, stop: int) -> None:
        if len(self.tokens) < stop:
            if not self.tokens:
                # A quarter less than the array made of the list.
                self.tokens.fromlist(request.prompt_token_ids)
            if len(self.tokens) < stop:
                self.tokens.extend(array("I", request.token_ids(len(self.tokens), stop)))

    def _hasher_at(self, block: int, block_size: int) -> Hasher:
        """`hasher`, when it has taken in all before a block: not less than before."""
        if (hasher := self.hasher) is None:
            hasher = self.hasher = hasher_of(self.root)
        if self.num_hashed < block:
            hasher.update(encode_tokens(self.tokens[self.num_hashed * block_size : block * block_size]))
            self.num_hashed = block
        return hasher

    def tail(self, request: Request, block_size: int) -> Tail | None:
        """What the request has computed of a block that is not full, if it has committed all before that. Less than half of one is
        worth less than what its block would take the place of."""
        block, rest = divmod(request.num_computed_tokens, block_size)
        if 2 * rest < block_size or block != self.num_committed:
            return None
        start = block * block_size
        if self.num_hashed > block:
            hasher = hasher_of(self.root)
            hasher.update(encode_tokens(self.tokens[:start]))
        else:
            hasher = self._hasher_at(block, block_size)
        name = tail_hash(hasher, request.token_ids(start, start + rest))
        return Tail(name, self.hashes[block - 1] if block else self.root, block, rest)

    def all_tokens(self, request: Request) -> array[int]:
        """Of a request that has ended."""
        if len(self.tokens) < request.num_tokens:
            self.tokens.extend(array("I", request.token_ids(len(self.tokens), request.num_tokens)))
        return self.tokens

    def check_invariants(self, block_size: int) -> None:
        assert self.num_hashed <= len(self.hashes)
        assert self.hashes == prompt_hashes(self.root, self.tokens[: len(self.hashes) * block_size], block_size)


def no_match(num_groups: int) -> PrefixMatch:
    return PrefixMatch(0, empty_tables(num_groups), (0,) * num_groups)


def empty_tables(num_groups: int) -> tuple[array[int], ...]:
    return (array("I"),) if num_groups == 1 else tuple(array("I") for _ in range(num_groups))
