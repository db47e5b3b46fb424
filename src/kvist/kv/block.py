"""What one block is called: block hashes.

A `BlockHash` is SHA-256 over a root and the token ids from the beginning of the sequence to the block's end. The root covers
everything else that changes keys and values: the key (model fingerprint, numeric profile), the KV format, the block size and the
request's salt. So two blocks have one name only if their bytes are equal (law L1). One running state gives the names of a whole
sequence: a block costs its own tokens, and less than a hash of its own would. This module knows neither pools nor requests.
A sequence's last block, if it is not full, has a name of the same kind, which no whole block has.
Invariants: a hash depends on all tokens from the beginning of the sequence on; the encoding is the same on every machine
(little-endian), so that stored blocks can be found again.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from struct import unpack
from typing import NamedTuple, NewType, Protocol, cast, overload

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 32
TOKEN_BYTES = 4
AT_ONCE = 256


def name_at(names: bytes, place: int) -> BlockHash:
    """One of several names that stand one after the other."""
    return BlockHash(names[HASH_BYTES * place : HASH_BYTES * (place + 1)])


class PackedNames(Sequence[BlockHash]):
    """Names that stand one after the other: a third of what a list of them takes."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    @overload
    def __getitem__(self, place: int) -> BlockHash: ...

    @overload
    def __getitem__(self, place: slice) -> list[BlockHash]: ...

    def __getitem__(self, place: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(place, slice):
            return [name_at(self.data, each) for each in range(*place.indices(len(self)))]
        return name_at(self.data, range(len(self))[place])


class Tail(NamedTuple):
    """The last block of a sequence, which is not full."""

    name: BlockHash
    parent: BlockHash
    block: int
    """Its place in the sequence."""
    num_tokens: int
    """In it."""


def make_key(*parts: str | bytes) -> bytes:
    """Join parts into one key, each with its length before it, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)


def root_hash(key: bytes, kv_format: str, block_size: int, salt: str) -> BlockHash:
    """The parent of a sequence's first block."""
    return BlockHash(sha256(make_key("kvist block root", key, kv_format, str(block_size), salt)).digest())


class Hasher(Protocol):
    """The state of hashlib's SHA-256."""

    def update(self, data: bytes, /) -> object: ...

    def digest(self) -> BlockHash: ...

    def copy(self) -> Hasher: ...


hasher_of = cast(Callable[[BlockHash], Hasher], sha256)
"""Of a root: the state before a sequence's first token."""


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Packed, the same on every machine."""
    words = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def extend_hashes(hashes: list[BlockHash], hasher: Hasher, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the blocks that follow `hashes`; `token_ids` are whole blocks that begin where the last one ended, and
    `hasher` has taken in what is before them."""
    assert len(token_ids) % block_size == 0, "only whole blocks have a hash"
    if len(token_ids) > AT_ONCE * block_size:
        # `struct` keeps a hundred formats, each of some 32 bytes a block.
        for begin in range(0, len(token_ids), AT_ONCE * block_size):
            extend_hashes(hashes, hasher, token_ids[begin : begin + AT_ONCE * block_size], block_size)
        return
    digest, blocks = hasher.digest, unpack(len(token_ids) // block_size * f"{TOKEN_BYTES * block_size}s", encode_tokens(token_ids))
    # Each is taken in right before its name is told.
    hashes += [digest() for _ in map(hasher.update, blocks)]


def tail_hash(hasher: Hasher, token_ids: Sequence[int]) -> BlockHash:
    """The name of what follows in a block that is not full; `hasher` has taken in what is before it, and stays as it is."""
    hasher = hasher.copy()
    hasher.update(encode_tokens(token_ids))
    return hasher.digest()


def prompt_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Of a prompt's whole blocks."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, hasher_of(root), token_ids[: len(token_ids) // block_size * block_size], block_size)
    return hashes
