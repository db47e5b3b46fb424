"""Where cached blocks are found: by stretches, which are successive blocks of one prefix in one KV group.

A block's name covers all tokens before it, so two sequences that have one name in common have all earlier ones in common. A prefix
is therefore found stretch by stretch, each by the name of its first block (its head) and one comparison, of the last name that
matters; blocks are entered and taken out by stretches too. So a block costs a fraction of one access to a dictionary, whatever the
pool's size, and what is known of neighbours lies together. No stretch goes past a block whose number in its prefix is a multiple of
MAX_STRETCH: one in the middle is mostly found at once behind the last of these, and else at most so many names back.

In one group a stretch of MIN_RECALLED blocks or more knows its tokens too, packed, and is found by the name before it and its first
block's tokens: so the names of a prefix that is here are told from its tokens, by comparing bytes, and need not be hashed again.
Shorter ones would save little and take too much memory for it.

Blocks are taken out from a prefix's end inwards, nearly always; one from the middle cuts its stretch in two. A prefix may have
holes: what is behind one begins with a head. This module knows no windows and no reference counts. Invariants: a name has one
block in a group; a stretch is not empty; `_of` leads from each block that is here to its stretch, and from all others nowhere; a
stretch knows the tokens of all its blocks or of none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from struct import unpack
from typing import NamedTuple
from zlib import crc32

from kvist.kv.block import HASH_BYTES, BlockHash, name_at
from kvist.kv.stretch import ID_BYTES, Stretch

MAX_STRETCH = 64
MIN_RECALLED = 8


class Heads(NamedTuple):
    """The stretches of one group by the names of their first blocks."""

    regular: dict[BlockHash, Stretch]
    """Those that begin at a multiple of MAX_STRETCH: all but few where prefixes share whole beginnings."""
    inside: dict[BlockHash, Stretch]
    """Those that begin between two of these: behind a fork or a hole."""
    alone: dict[BlockHash, Stretch]
    """Blocks that nothing follows, whatever their number."""

    def at(self, block: int) -> dict[BlockHash, Stretch]:
        return self.inside if block % MAX_STRETCH else self.regular

    def remove(self, name: BlockHash) -> None:
        if self.regular.pop(name, None) is None and self.inside.pop(name, None) is None:
            del self.alone[name]


class Removed(NamedTuple):
    """Successive blocks that were taken out, in the order of the prefix."""

    root: BlockHash
    names: bytes
    block_ids: list[int]
    group: int


class Stretches:
    """Of `num_groups` groups, whose block ids are below `num_blocks`; those of the group `recalled`, if any, are known by their
    tokens too. A block's tokens take `block_bytes`."""

    def __init__(self, num_blocks: int, num_groups: int, block_bytes: int, recalled: int | None) -> None:
        self._of: list[Stretch | None] = [None] * num_blocks
        self._heads = tuple(Heads({}, {}, {}) for _ in range(num_groups))
        self._block_bytes, self._recalled = block_bytes, recalled
        self._beginnings: dict[int, Stretch] = {}
        """By a checksum of the name before it and its first block's tokens: the latest with that."""

    def __iter__(self) -> Iterator[Stretch]:
        for group in range(len(self._heads)):
            yield from self._of_group(group)

    def _of_group(self, group: int) -> Iterator[Stretch]:
        return chain.from_iterable(map(dict.values, self._heads[group]))

    def of(self, block_id: int) -> Stretch | None:
        return self._of[block_id]

    def of_all(self, begin: int, end: int) -> list[Stretch | None]:
        """Of the blocks with these ids."""
        return self._of[begin:end]

    def place(self, block_id: int) -> tuple[Stretch, int] | None:
        """A block's stretch, and where it stands in it."""
        stretch = self._of[block_id]
        return None if stretch is None else (stretch, stretch.block_ids().index(block_id))

    def find(self, group: int, hashes: Sequence[BlockHash], block: int) -> tuple[Stretch, int] | None:
        """Where the block number `block` of a prefix is."""
        heads, begin = self._heads[group], block - block % MAX_STRETCH
        stretch = heads.regular.get(hashes[begin])
        if stretch is not None and stretch.holds(block - begin, hashes[block]):
            return stretch, block - begin
        for first in range(block, begin, -1) if heads.inside else ():
            if (stretch := heads.inside.get(hashes[first])) is not None:
                if stretch.holds(block - first, hashes[block]):
                    return stretch, block - first
                # The block of this name is here, so no stretch that begins before it reaches beyond it.
                break
        alone = heads.alone.get(hashes[block])
        return None if alone is None else (alone, 0)

    def find_near(self, group: int, hashes: Sequence[BlockHash], block: int, block_id: int) -> tuple[Stretch, int] | None:
        """The same, found at once if it is `block_id`, as the asker holds that."""
        stretch = self._of[block_id]
        if stretch is not None and stretch.group == group and (offset := stretch.offset_of(hashes[block])) is not None:
            return stretch, offset
        return self.find(group, hashes, block)

    def note(self, group: int, hashes: Sequence[BlockHash], block: int, block_id: int, finds: int, used_at: float) -> None:
        """A request found, so many times, or used the block number `block` of a prefix, if that is here, likely as `block_id`."""
        if (place := self.find_near(group, hashes, block, block_id)) is not None:
            place[0].note(place[1], finds, used_at)

    def alone(self, group: int, name: BlockHash) -> int | None:
        """The block of this name that was entered alone."""
        stretch = self._heads[group].alone.get(name)
        return None if stretch is None else stretch.block_ids()[0]

    def leading(self, group: int, hashes: Sequence[BlockHash], limit: int, found: array[int] | None = None) -> array[int]:
        """The first blocks of a prefix, up to the first that is missing; of them `found` is known, and gets the others."""
        heads, found = self._heads[group], array("I") if found is None else found
        length = len(found)
        while length < limit and (stretch := heads.at(length).get(hashes[length])) is not None:
            count = stretch.reach(0, hashes, length, limit)
            found.frombytes(stretch.packed_ids[: ID_BYTES * count])
            length += count
        return found

    def every(self, group: int, hashes: Sequence[BlockHash]) -> list[int | None]:
        """All blocks of a prefix, None for those that are missing."""
        heads, found = self._heads[group], list[int | None]()
        while (block := len(found)) < len(hashes):
            if (stretch := heads.at(block).get(hashes[block])) is None:
                found.append(None)
            else:
                found += stretch.block_ids()[: stretch.reach(0, hashes, block, len(hashes))]
        return found

    def recall(self, root: BlockHash, tokens: array[int], num_blocks: int) -> tuple[list[BlockHash], array[int]]:
        """The names of the first blocks of a prefix, up to so many, as far as they are known by its tokens; and the blocks."""
        found, block_ids = list[BlockHash](), array("I")
        parent, size = root, self._block_bytes // tokens.itemsize
        while (block := len(found)) < num_blocks:
            stretch = self._beginnings.get(crc32(parent + tokens[block * size : (block + 1) * size].tobytes()))
            if stretch is None or stretch.parent != parent:
                break
            piece = tokens[block * size : min(num_blocks, block + MAX_STRETCH) * size].tobytes()
            if not (count := stretch.common_blocks(piece, self._block_bytes)):
                break
            found += unpack(count * f"{HASH_BYTES}s", stretch.names[: count * HASH_BYTES])
            block_ids.frombytes(stretch.packed_ids[: ID_BYTES * count])
            parent = found[-1]
        return found, block_ids

    def insert(
        self,
        group: int,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        start: int,
        block_ids: Sequence[int],
        tokens: array[int],
        before: int = 0,
    ) -> list[tuple[int, int]]:
        """Enter the blocks of a prefix, which has these tokens, from number `start` on, as far as their names have no block; of
        which numbers [from, to). The block before them is likely `before`."""
        heads, stop, new = self._heads[group], start + len(block_ids), list[tuple[int, int]]()
        place = self.find_near(group, hashes, start - 1, before) if start else None
        stretch, offset = (None, 0) if place is None else (place[0], place[1] + 1)
        block = start
        while block < stop:
            if stretch is not None and (known := stretch.reach(offset, hashes, block, stop)):
                block, offset = block + known, offset + known
            elif (head := heads.at(block).get(hashes[block])) is not None:
                stretch, offset = head, 0
            else:
                end = self._first_head(heads, hashes, block + 1, stop)
                ids = block_ids[block - start : end - start]
                stretch = self._append(stretch, offset, group, root, hashes, block, ids, tokens)
                new.append((block, end))
                block, offset = end, stretch.num_blocks
        return new

    def insert_alone(self, group: int, root: BlockHash, parent: BlockHash, name: BlockHash, block_id: int) -> bool:
        """Enter a block that nothing follows; whether no other has its name."""
        if name in self._heads[group].alone:
            return False
        stretch = self._heads[group].alone[name] = self._of[block_id] = Stretch(group, root, parent)
        stretch.names = name
        stretch.packed_ids = array("I", (block_id,)).tobytes()
        return True

    def _first_head(self, heads: Heads, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """What is missing ends with a head: a block that follows in a stretch has one before it."""
        for block in range(start + -start % MAX_STRETCH, stop, MAX_STRETCH):
            if hashes[block] in heads.regular:
                stop = block
                break
        if not heads.inside or heads.inside.keys().isdisjoint(hashes[start:stop]):
            return stop
        return next(block for block in range(start, stop) if hashes[block] in heads.inside)

    def _append(
        self,
        last: Stretch | None,
        offset: int,
        group: int,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        start: int,
        block_ids: Sequence[int],
        tokens: array[int],
    ) -> Stretch:
        """Enter the blocks of a prefix, at least one, from number `start` on, behind the first `offset` of the stretch `last`: in
        it if it ends there, and in new ones. Returns the last."""
        of, block, stop, stretch = self._of, start, start + len(block_ids), last
        while stretch is None or block < stop:
            if stretch is None or not block % MAX_STRETCH or offset < stretch.num_blocks:
                stretch = Stretch(group, root, hashes[block - 1] if block else root, stretch)
                self._heads[group].at(block)[hashes[block]] = stretch
            else:
                stretch.keep_notes()
            end = min(stop, block - block % MAX_STRETCH + MAX_STRETCH)
            ids = block_ids[block - start : end - start]
            stretch.names += b"".join(hashes[block:end])
            stretch.packed_ids += array("I", ids).tobytes()
            for block_id in ids:
                of[block_id] = stretch
            if group == self._recalled:
                self._learn(stretch, end, tokens)
            block, offset = end, stretch.num_blocks
        return stretch

    def _learn(self, stretch: Stretch, end: int, tokens: array[int]) -> None:
        """The stretch ends before block number `end` of a prefix with these tokens."""
        count, size = stretch.num_blocks, self._block_bytes // tokens.itemsize
        if stretch.tokens:
            stretch.tokens += tokens[(end - count) * size + len(stretch.tokens) // tokens.itemsize : end * size].tobytes()
        elif count >= MIN_RECALLED:
            stretch.tokens = tokens[(end - count) * size : end * size].tobytes()
            self._beginnings[self._beginning(stretch)] = stretch

    def _beginning(self, stretch: Stretch) -> int:
        return crc32(stretch.parent + stretch.tokens[: self._block_bytes])

    def replace(self, block_id: int, other: int) -> None:
        """Let `block_id` stand where `other` does, which is taken out."""
        place = self.place(other)
        assert place is not None, f"block {other} is not indexed"
        stretch, offset = place
        ids = stretch.block_ids()
        ids[offset] = block_id
        stretch.packed_ids = ids.tobytes()
        self._of[block_id], self._of[other] = stretch, None

    def remove(self, block_ids: list[int]) -> list[Removed]:
        """Take out different blocks, all of them here, those of one stretch the last first."""
        removed: list[Removed] = []
        done, count, packed = 0, len(block_ids), array("I", block_ids[::-1]).tobytes()
        while done < count:
            stretch = self._of[block_ids[done]]
            assert stretch is not None, f"one of the blocks {block_ids} is not indexed"
            size = min(stretch.num_blocks, count - done)
            if not stretch.packed_ids.endswith(packed[ID_BYTES * (count - done - size) : ID_BYTES * (count - done)]):
                return removed + self._remove_any(block_ids[done:])
            removed.append(self._cut(stretch, block_ids[done : done + size][::-1]))
            done += size
        return removed

    def _remove_any(self, block_ids: list[int]) -> list[Removed]:
        """Those of one stretch need not follow each other, and need not be its last."""
        by_stretch: dict[Stretch | None, set[int]] = {}
        for block_id in block_ids:
            by_stretch.setdefault(self._of[block_id], set()).add(block_id)
        removed: list[Removed] = []
        for stretch, ids in by_stretch.items():
            assert stretch is not None, f"one of the blocks {block_ids} is not indexed"
            runs = [(gone, list(run)) for gone, run in groupby(stretch.block_ids(), ids.__contains__)]
            end = stretch.num_blocks
            # From the end inwards, so that a stretch is cut in two only where it goes on.
            for gone, run in reversed(runs):
                if gone:
                    self._split(stretch, end)
                    removed.append(self._cut(stretch, run))
                end -= len(run)
        return removed

    def _cut(self, stretch: Stretch, ends: list[int]) -> Removed:
        """Take out a stretch's last blocks, which are these."""
        keep, of = stretch.num_blocks - len(ends), self._of
        names = stretch.names[HASH_BYTES * keep :]
        for block_id in ends:
            of[block_id] = None
        if keep:
            self._shorten(stretch, keep)
        else:
            if stretch.before is not None:
                stretch.pass_notes_on()
            self._heads[stretch.group].remove(name_at(names, 0))
            if stretch.tokens and self._beginnings.get(place := self._beginning(stretch)) is stretch:
                del self._beginnings[place]
            # Those behind it may lead here until they are gone.
            stretch.names = stretch.tokens = stretch.packed_ids = b""
        return Removed(stretch.root, names, ends, stretch.group)

    def _shorten(self, stretch: Stretch, keep: int) -> None:
        stretch.names, stretch.tokens = stretch.names[: HASH_BYTES * keep], stretch.tokens[: self._block_bytes * keep]
        stretch.packed_ids = stretch.packed_ids[: ID_BYTES * keep]

    def _split(self, stretch: Stretch, keep: int) -> None:
        """Let what is behind the first `keep` blocks be a stretch of its own."""
        if keep == stretch.num_blocks:
            return
        behind = Stretch(stretch.group, stretch.root, stretch.name(keep - 1), stretch)
        stretch.keep_notes()
        behind.notes = tuple((offset - keep, finds, used_at) for offset, finds, used_at in stretch.notes if offset >= keep)
        stretch.notes = tuple(note for note in stretch.notes if note[0] < keep)
        behind.names, behind.packed_ids = stretch.names[HASH_BYTES * keep :], stretch.packed_ids[ID_BYTES * keep :]
        behind.tokens = stretch.tokens[self._block_bytes * keep :]
        self._shorten(stretch, keep)
        self._heads[stretch.group].inside[behind.name(0)] = behind
        if behind.tokens:
            self._beginnings[self._beginning(behind)] = behind
        for block_id in behind.block_ids():
            self._of[block_id] = behind

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        names: set[tuple[int, BlockHash]] = set()
        for group, heads in enumerate(self._heads):
            assert all(stretch.num_blocks == 1 for stretch in heads.alone.values())
            for head, stretch in chain.from_iterable(map(dict.items, heads)):
                count = stretch.num_blocks
                assert 0 < count <= MAX_STRETCH
                assert (len(stretch.names), len(stretch.packed_ids)) == (HASH_BYTES * count, ID_BYTES * count)
                assert (stretch.group, stretch.name(0)) == (group, head)
                offsets = [note[0] for note in stretch.notes]
                assert len(offsets) == len(set(offsets))
                assert len(stretch.tokens) in (0, self._block_bytes * count)
                assert all(self._of[block_id] is stretch for block_id in stretch.block_ids())
                names.update((group, stretch.name(offset)) for offset in range(count))
        for place, stretch in self._beginnings.items():
            assert stretch.tokens
            assert self._beginning(stretch) == place
            assert stretch in (heads.get(stretch.name(0)) for heads in self._heads[stretch.group])
        assert len(names) == sum(stretch.num_blocks for stretch in self) == self._num_placed()

    def _num_placed(self) -> int:
        return len(self._of) - self._of.count(None)
