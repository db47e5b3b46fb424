"""The prefix index: (block hash, KV group) -> block id, and the longest prefix that every group still has.

A full-attention group needs every block of the prefix; a windowed group needs only the blocks that the next row's window reaches
into. The index knows neither reference counts nor eviction order: the pool tells it which block is reused; how blocks
are kept and found is `kv/stretches.py`. Invariants: one block per (hash, group) and one (hash, group) per block; what is found was
computed before it was put in.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvist.kv.block import TOKEN_BYTES, BlockHash, Tail
from kvist.kv.spec import first_block
from kvist.kv.stretch import Stretch
from kvist.kv.stretches import Removed, Stretches


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
    takes_over: bool = False
    """These blocks are not copied but taken over: nobody holds them, and they hold no more."""

    def whole(self) -> PrefixMatch:
        """What needs no copy."""
        if not self.num_copied:
            return self
        return self._replace(num_tokens=self.num_tokens - self.num_copied, copied_from=(), num_copied=0, takes_over=False)

    def ways(self) -> list[PrefixMatch]:
        """As much of it as there may be room for, the most first."""
        return [self, self.whole()] if self.num_copied else [self]


class PrefixIndex:
    """`windows[group]` is the group's attention window in tokens, None for full attention. A block is named by a prefix, which is a
    list of names from the first block on, and its number in it."""

    def __init__(self, num_blocks: int, windows: tuple[int | None, ...], block_size: int) -> None:
        self._windows = windows
        self.block_size = block_size
        self.num_blocks = num_blocks
        # A prefix has all its blocks in a group with full attention only.
        self._recalled = windows.index(None) if None in windows else None
        self._stretches = Stretches(num_blocks, len(windows), TOKEN_BYTES * block_size, self._recalled)
        self._tails: dict[int, int] = {}
        """Of the blocks that are not full, how many tokens they hold."""
        self._watchers: list[dict[int, None]] = []

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    def count(self, root: BlockHash | None = None) -> int:
        """Of all indexed blocks, or those of one root."""
        return sum(self.count_in(group, root) for group in range(self.num_groups))

    def count_in(self, group: int, root: BlockHash | None) -> int:
        """The same of one group."""
        return self._stretches.count(group, root)

    def get(self, group: int, hashes: Sequence[BlockHash], block: int, near: int = 0) -> int | None:
        """The block number `block` of a prefix, likely `near`."""
        found = self._stretches.find_near(group, hashes, block, near)
        return None if found is None else found[0].block_ids()[found[1]]

    def block(self, group: int, hashes: Sequence[BlockHash], block: int) -> int:
        """The same of one that is here."""
        block_id = self.get(group, hashes, block)
        assert block_id is not None, f"the block number {block} of this prefix is not here"
        return block_id

    def get_tail(self, group: int, name: BlockHash) -> int | None:
        """A block that is not full."""
        return self._stretches.alone(group, name)

    def tail_tokens(self, block_id: int) -> int | None:
        """How many tokens an indexed block holds that is not full."""
        return self._tails.get(block_id)

    def every(self, group: int, hashes: Sequence[BlockHash]) -> list[int | None]:
        """All blocks of a prefix, None for those that are missing."""
        return self._stretches.every(group, hashes)

    def among(self, hashes: Sequence[BlockHash]) -> tuple[dict[BlockHash, int], ...]:
        """Per group, the blocks that it has of a prefix."""
        return tuple(
            {name: block_id for name, block_id in zip(hashes, self.every(group, hashes), strict=True) if block_id is not None}
            for group in range(self.num_groups)
        )

    def is_indexed(self, block_id: int) -> bool:
        return self._stretches.of(block_id) is not None

    def hash_of(self, block_id: int) -> BlockHash | None:
        place = self._stretches.place(block_id)
        return None if place is None else place[0].name(place[1])

    def name_of(self, block_id: int) -> BlockHash:
        """Of an indexed block."""
        name = self.hash_of(block_id)
        assert name is not None, f"block {block_id} is not indexed"
        return name

    def root_of(self, block_id: int) -> BlockHash:
        """The root of an indexed block's prefix."""
        return self._stretch_of(block_id).root

    def _stretch_of(self, block_id: int) -> Stretch:
        stretch = self._stretches.of(block_id)
        assert stretch is not None, f"block {block_id} is not indexed"
        return stretch

    def note(self, hashes: Sequence[BlockHash], num_blocks: int, table: array[int], finds: int, now: float) -> None:
        """A request has used a prefix of so many blocks, at least one, in the first group by this table, and found it so many
        times."""
        self._stretches.note(0, hashes, num_blocks - 1, table[num_blocks - 1], finds, now)

    def stretches_of(self, begin: int, end: int) -> list[Stretch | None]:
        """Of the blocks with these ids, one each; None of one that is not indexed."""
        return self._stretches.of_all(begin, end)

    def num_tokens(self, block_id: int) -> int:
        """Of an indexed block."""
        return self._tails.get(block_id, self.block_size)

    def tails_among(self, block_ids: list[int]) -> list[int]:
        """Those of these blocks that are not full."""
        if self._tails.keys().isdisjoint(block_ids):
            return []
        return [block_id for block_id in block_ids if block_id in self._tails]

    def recall(self, root: BlockHash, tokens: array[int], limit: int) -> tuple[list[BlockHash], array[int]]:
        """The names of a prefix's first blocks, up to `limit`, as far as its tokens tell them: they need not be worked out. And, of
        one of the groups with full attention, the blocks."""
        if self._recalled is None:
            return [], array("I")
        return self._stretches.recall(root, tokens, limit)

    def insert(
        self,
        group: int,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        start: int,
        block_ids: list[int],
        tokens: array[int],
        before: int = 0,
    ) -> tuple[list[int], Sequence[BlockHash]]:
        """Enter computed blocks that are not indexed yet, those of a prefix from number `start` on; returns those that are new,
        whose names no other block has already. `tokens`: of the prefix, up to the end of these blocks at least. `before`: the
        block before them, in the asker's table, or any."""
        new = self._stretches.insert(group, root, hashes, start, block_ids, tokens, before)
        if new == [(start, start + len(block_ids))]:
            return block_ids, hashes[start : start + len(block_ids)]
        blocks = [block for first, end in new for block in range(first, end)]
        return [block_ids[block - start] for block in blocks], [hashes[block] for block in blocks]

    def insert_tail(self, group: int, root: BlockHash, tail: Tail, block_id: int) -> bool:
        """Enter a block that is not full; whether it was not named yet, nor another so."""
        new = not self.is_indexed(block_id) and self._stretches.insert_alone(group, root, tail.parent, tail.name, block_id)
        if new:
            self._tails[block_id] = tail.num_tokens
        return new

    def remove(self, block_ids: list[int]) -> list[Removed]:
        """Forget blocks, at least one, that are about to be reused, the last of a prefix first."""
        if self._tails:
            for block_id in self.tails_among(block_ids):
                del self._tails[block_id]
        return self._stretches.remove(block_ids)

    def replace(self, block_id: int, other: int) -> None:
        """Find `block_id`, which is not indexed, where `other` was found, a full block of the same content."""
        assert not self.is_indexed(block_id)
        self._stretches.replace(block_id, other)
        for replaced in self._watchers:
            replaced[block_id] = None

    @contextmanager
    def watch(self, replaced: dict[int, None]) -> Iterator[None]:
        """Meanwhile what is here has another block: `replaced` gets that."""
        self._watchers.append(replaced)
        try:
            yield
        finally:
            self._watchers = [one for one in self._watchers if one is not replaced]

    def match(self, hashes: Sequence[BlockHash], limit: int, recalled: array[int] | None = None) -> PrefixMatch:
        """The longest prefix, of at most the first `limit` blocks of `hashes`, that is valid in every group. `recalled`: the first
        of them, as `recall` has just told."""
        if self._windows == (None,):
            found = self._stretches.leading(0, hashes, limit, recalled)
            return PrefixMatch(len(found) * self.block_size, (found,), (0,))
        tables = self.among(hashes[:limit])
        length = self.longest(hashes, limit, tables)
        position = length * self.block_size
        firsts = tuple(first_block(position, window, self.block_size) for window in self._windows)
        ids = []
        for table, first in zip(tables, firsts, strict=True):
            entries = array("I", bytes(4 * first))
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

    def needed(self, hashes: Sequence[BlockHash], length: int) -> list[tuple[int, int, int | None]]:
        """(group, number, block if it is here) of what a prefix of `length` blocks needs, in the order of positions."""
        position, tables = length * self.block_size, self.among(hashes[:length])
        firsts = [first_block(position, window, self.block_size) for window in self._windows]
        return [
            (group, block, table.get(hashes[block]))
            for block in range(min(firsts), length)
            for group, (table, first) in enumerate(zip(tables, firsts, strict=True))
            if block >= first
        ]

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        self._stretches.check_invariants()
        for block_id, count in self._tails.items():
            assert 0 < count < self.block_size
            assert self._stretch_of(block_id).num_blocks == 1


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
