"""What a tier keeps with a block's bytes: whose it is, where it stands in its sequence, its tokens, and the format of all that.

From it, and from nothing else, a new process knows which prefix a block on disk belongs to and what it begins with. The owner is
the root of the prefix: a SHA-256 over model, profile, format and salt, from which neither key nor salt can be computed back. A tier
may have many, so they stay encoded, and the parts that are asked for often are cut out. This module knows no tier. Invariant: the
encoding is the same on every machine.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import NamedTuple

from kvist.kv.block import HASH_BYTES, BlockHash

_FORMAT = struct.Struct("<16sH")
_PARENT = _FORMAT.size + HASH_BYTES
_TOKENS = _PARENT + HASH_BYTES


class Origin(NamedTuple):
    """`form` is what `encode_format` makes."""

    form: bytes
    root: BlockHash
    parent: BlockHash
    """The block before it, or the root."""
    tokens: array[int]
    """All that it holds: fewer than a block of a sequence's last one."""

    def encode(self) -> bytes:
        return b"".join((self.form, self.root, self.parent, _little(self.tokens).tobytes()))


def encode_format(kv_format: str, block_size: int) -> bytes:
    assert len(kv_format.encode()) <= 16, "a KV format has a short name"
    return _FORMAT.pack(kv_format.encode(), block_size)


def decode_format(form: bytes) -> tuple[str, int]:
    name, block_size = _FORMAT.unpack(form)
    return name.rstrip(b"\0").decode(), block_size


def format_of(origin: bytes) -> bytes:
    return origin[: _FORMAT.size]


def root_of(origin: bytes) -> BlockHash:
    return BlockHash(origin[_FORMAT.size : _PARENT])


def parent_of(origin: bytes) -> BlockHash:
    return BlockHash(origin[_PARENT:_TOKENS])


def tokens_of(origin: bytes) -> array[int]:
    return _little(array("I", origin[_TOKENS:]))


def max_bytes(block_size: int) -> int:
    return _TOKENS + 4 * block_size


def _little(tokens: array[int]) -> array[int]:
    """From or to the order of bytes in which they are kept."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens
