"""The prefix index: (block hash, KV group) -> block id, and the longest prefix that every group still has.

A full-attention group needs every block of the prefix; a windowed group needs only the blocks that the next row's window reaches
into. The index knows neither reference counts nor eviction order: the pool tells it which block is reused. Invariants: one block
per (hash, group) and one (hash, group) per block; what is found was computed before it was put in.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvist.kv.block import BlockHash, Tail
from kvist.kv.columns import gather
from kvist.kv.spec import first_block


class PrefixMatch(NamedTuple):
    """A prefix of `num_tokens` that needs no computing and, per group, the ids of its logical blocks. Entries before
    `first_blocks[group]` are outside the window of the next row and hold 0."""

    num_tokens: int
    block_ids: tuple[array[int], ...]
    """Of whole blocks, which hold all but the last `num_copied` tokens."""
    first_blocks: tuple[int, ...]
    copied_from: tuple[int, ...] = ()
    """Per group, the block whose first `num_copied` tokens are copied; empty if none are."""
    num_copied: int = 0

    def whole(self) -> PrefixMatch:
        """What needs no copy."""
        return (
            self
            if not self.num_copied
            else self._replace(num_tokens=self.num_tokens - self.num_copied, copied_from=(), num_copied=0)
        )


class IndexListing(NamedTuple):
    """The index at one moment, by block id: hash, hash of the block before it in its prefix (or the root), root, and KV group (two
    bytes each). A block that is not indexed has no hash and no root; the rest of it means nothing."""

    hash_of: tuple[BlockHash | None, ...]
    parent_of: tuple[BlockHash | None, ...]
    root_of: tuple[BlockHash | None, ...]
    group_of: bytes
    tails: Mapping[int, int]
    """Of blocks that are not full, how many tokens they hold."""


class PrefixIndex:
    """`windows[group]` is the group's attention window in tokens, None for full attention."""

    def __init__(self, num_blocks: int, windows: tuple[int | None, ...], block_size: int) -> None:
        self._windows = windows
        self.block_size = block_size
        self._tables: tuple[dict[BlockHash, int], ...] = tuple({} for _ in windows)
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._parent_of: list[BlockHash | None] = [None] * num_blocks
        self._root_of: list[BlockHash | None] = [None] * num_blocks
        self._group_of = array("H", bytes(2 * num_blocks))
        self._tails: dict[int, int] = {}
        """Of the blocks that are not full, how many tokens they hold."""

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def get(self, group: int, block_hash: BlockHash | None) -> int | None:
        return None if block_hash is None else self._tables[group].get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._hash_of[block_id]

    def group_of(self, block_id: int) -> int:
        return self._group_of[block_id]

    @property
    def num_groups(self) -> int:
        return len(self._tables)

    def names(self, block_ids: Iterable[int]) -> list[BlockHash | None]:
        return list(map(self._hash_of.__getitem__, block_ids))

    def parents(self, block_ids: Iterable[int]) -> list[BlockHash | None]:
        """The names of the blocks before these, or the roots."""
        return list(map(self._parent_of.__getitem__, block_ids))

    def root_of(self, block_id: int) -> BlockHash:
        """The root of an indexed block's prefix."""
        root = self._root_of[block_id]
        assert root is not None, f"block {block_id} is not indexed"
        return root

    def listing(self) -> IndexListing:
        """A copy of all that is indexed: what it costs is the copying of arrays."""
        return IndexListing(
            tuple(self._hash_of), tuple(self._parent_of), tuple(self._root_of), bytes(self._group_of), dict(self._tails)
        )

    def insert(
        self, group: int, root: BlockHash, parent: BlockHash, block_hashes: Sequence[BlockHash], block_ids: list[int]
    ) -> tuple[list[int], Sequence[BlockHash]]:
        """Enter computed blocks that are not indexed yet and follow each other behind `parent`; returns those that are new, whose
        names no other block has already."""
        assert len(block_hashes) == len(block_ids)
        owners = list(map(self._tables[group].setdefault, block_hashes, block_ids))
        hash_of, parent_of, root_of = self._hash_of, self._parent_of, self._root_of
        if owners == block_ids:
            for block_id, block_hash in zip(block_ids, block_hashes, strict=False):
                hash_of[block_id] = block_hash
                parent_of[block_id] = parent
                root_of[block_id] = root
                parent = block_hash
        else:
            entries = zip(block_ids, owners, block_hashes, (parent, *block_hashes), strict=False)
            new = [(block_id, block_hash, before) for block_id, owner, block_hash, before in entries if block_id == owner]
            for block_id, block_hash, before in new:
                hash_of[block_id], parent_of[block_id], root_of[block_id] = block_hash, before, root
            block_ids, block_hashes = [entry[0] for entry in new], [entry[1] for entry in new]
        if len(self._tables) > 1:
            for block_id in block_ids:
                self._group_of[block_id] = group
        return block_ids, block_hashes

    def insert_tail(self, group: int, root: BlockHash, tail: Tail, block_id: int) -> bool:
        """Enter a block that is not full; whether it was not named yet, nor another so."""
        new = self._hash_of[block_id] is None and bool(self.insert(group, root, tail.parent, [tail.name], [block_id])[0])
        if new:
            self._tails[block_id] = tail.num_tokens
        return new

    def remove(self, block_ids: Sequence[int]) -> tuple[Sequence[BlockHash], Sequence[BlockHash | None]]:
        """Forget blocks, at least one, that are about to be reused. Returns what their contents were called, and the roots of their
        prefixes: one each, or the one of all."""
        if self._tails:
            for block_id in block_ids:
                self._tails.pop(block_id, None)
        hash_of, root_of, tables = self._hash_of, self._root_of, self._tables
        removed = [name for name in gather(hash_of, block_ids) if name is not None]
        roots = gather(root_of, block_ids)
        assert len(removed) == len(block_ids), f"one of the blocks {block_ids} is not indexed"
        for block_id in block_ids:
            hash_of[block_id] = root_of[block_id] = None
        if len(tables) == 1:
            (table,) = tables
            for block_hash in removed:
                del table[block_hash]
        else:
            for block_id, block_hash in zip(block_ids, removed, strict=True):
                del tables[self._group_of[block_id]][block_hash]
        return removed, roots[:1] if roots.count(roots[0]) == len(roots) else roots

    def match(self, hashes: Sequence[BlockHash], limit: int) -> PrefixMatch:
        """The longest prefix, of at most the first `limit` blocks of `hashes`, that is valid in every group."""
        if self._windows == (None,):
            found = _leading(self._tables[0], hashes[:limit])
            return PrefixMatch(len(found) * self.block_size, (array("i", found),), (0,))
        length = self.longest(hashes, limit, self._tables)
        position = length * self.block_size
        firsts = tuple(first_block(position, window, self.block_size) for window in self._windows)
        ids = []
        for table, first in zip(self._tables, firsts, strict=True):
            entries = array("i", bytes(4 * first))
            entries.extend(map(table.__getitem__, hashes[first:length]))
            ids.append(entries)
        return PrefixMatch(position, tuple(ids), firsts)

    def longest(self, hashes: Sequence[BlockHash], limit: int, tables: Sequence[Container[BlockHash]]) -> int:
        """The most leading blocks, up to `limit`, that would be valid in every group if group g had what `tables[g]` has.

        Each group shortens the length to the longest that it accepts, until all accept the same one: every round only passes over
        lengths that some group refuses, so the first common length is the longest.
        """
        length = limit
        for table, window in zip(tables, self._windows, strict=True):
            if window is None:
                length = _longest_full(table, hashes, length)
        agreed = False
        while not agreed:
            before = length
            for table, window in zip(tables, self._windows, strict=True):
                if window is not None:
                    length = _longest_windowed(table, hashes, length, -(-(window - 1) // self.block_size))
            agreed = length == before
        return length

    @property
    def tables(self) -> tuple[Container[BlockHash], ...]:
        """Per group, the names that are found."""
        return self._tables

    def missing(self, hashes: Sequence[BlockHash], length: int) -> list[tuple[int, BlockHash]]:
        """(group, name) of the blocks that a prefix of `length` blocks needs and that are not here, in the order of positions."""
        position = length * self.block_size
        firsts = [first_block(position, window, self.block_size) for window in self._windows]
        return [
            (group, hashes[block])
            for block in range(min(firsts), length)
            for group, (table, first) in enumerate(zip(self._tables, firsts, strict=True))
            if block >= first and hashes[block] not in table
        ]

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        indexed = sum(block_hash is not None for block_hash in self._hash_of)
        assert indexed == len(self)
        assert all(self._hash_of[block_id] is not None and 0 < count < self.block_size for block_id, count in self._tails.items())
        for group, table in enumerate(self._tables):
            for block_hash, block_id in table.items():
                assert self._hash_of[block_id] == block_hash
                assert self._group_of[block_id] == group


def _leading(table: dict[BlockHash, int], hashes: Sequence[BlockHash]) -> list[int]:
    """What is found before the first name that is not."""
    found: list[int] = []
    if hashes and hashes[0] in table:
        # A list keeps what came before the error; a loop of our own would take twice as long.
        with suppress(KeyError):
            found.extend(map(table.__getitem__, hashes))
    return found


def _longest_full(table: Container[BlockHash], hashes: Sequence[BlockHash], limit: int) -> int:
    """Blocks are missing anywhere, not only at the end: a parent whose twin was kept may be evicted before its child."""
    for length, block_hash in enumerate(hashes[:limit]):
        if block_hash not in table:
            return length
    return limit


def _longest_windowed(table: Container[BlockHash], hashes: Sequence[BlockHash], limit: int, needed: int) -> int:
    """The longest length up to `limit` whose last `needed` blocks (or all, if it has fewer) are present."""
    end = limit
    for block in range(limit - 1, -1, -1):
        if end - block > needed:
            return end
        if hashes[block] not in table:
            end = block
    return end
