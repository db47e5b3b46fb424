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
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from struct import unpack_from
from typing import NamedTuple
from zlib import crc32

from kvist.kv.block import HASH_BYTES, BlockHash
from kvist.kv.stretch import BLOCK_BYTES, ID_BYTES, NAME_FORMAT, Family, Origin, Stretch
from kvist.kv.stretch_heads import Heads

MAX_STRETCH = 64
MIN_RECALLED = 8
NUM_ORIGINS = 64


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
        self._heads = tuple(Heads(MAX_STRETCH) for _ in range(num_groups))
        self._families = tuple[dict[BlockHash, Family], ...]({} for _ in range(num_groups))
        """Per group, by root."""
        self._block_bytes, self._recalled = block_bytes, recalled
        self._origins: list[Origin | None] = [None] * NUM_ORIGINS
        """The latest by some bits of the name before them: what begins behind one block, one prompt after the other, shares one."""
        self._beginnings: dict[int, Stretch] = {}
        """By a checksum of the name before it and its first block's tokens: the latest with that."""

    def __iter__(self) -> Iterator[Stretch]:
        return chain.from_iterable(self._heads)

    def count(self, group: int, root: BlockHash | None) -> int:
        """How many blocks are here, of a root or all."""
        families = self._families[group]
        if root is None:
            return sum(family.num_blocks for family in families.values())
        return families[root].num_blocks if root in families else 0

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
        stretch = heads.get(0, hashes[begin])
        if stretch is not None and stretch.holds(block - begin, hashes[block]):
            return stretch, block - begin
        for first in range(block, begin, -1) if heads.inside else ():
            if (stretch := heads.inside.get(hashes[first])) is not None:
                if stretch.holds(block - first, hashes[block]):
                    return stretch, block - first
                # The block of this name is here, so no stretch that begins before it reaches beyond it.
                break
        # A block that nothing follows.
        alone = heads.get(0, hashes[block])
        return None if alone is None else (alone, 0)

    def find_near(self, group: int, hashes: Sequence[BlockHash], block: int, block_id: int) -> tuple[Stretch, int] | None:
        """The same, found at once if it is `block_id`, as the asker holds that."""
        stretch = self._of[block_id]
        if (
            stretch is not None
            and stretch.origin.family.group == group
            and (offset := stretch.offset_of(hashes[block])) is not None
        ):
            return stretch, offset
        return self.find(group, hashes, block)

    def note(self, group: int, hashes: Sequence[BlockHash], block: int, block_id: int, finds: int, used_at: float) -> None:
        """A request found, so many times, or used the block number `block` of a prefix, if that is here, likely as `block_id`."""
        stretch = self._of[block_id]
        if (
            stretch is not None
            and stretch.origin.family.group == group
            and (offset := stretch.offset_of(hashes[block])) is not None
        ):
            stretch.note(offset, finds, used_at)
        elif (place := self.find(group, hashes, block)) is not None:
            place[0].note(place[1], finds, used_at)

    def alone(self, group: int, name: BlockHash) -> int | None:
        """The block of this name that was entered alone."""
        stretch = self._heads[group].get(0, name)
        return None if stretch is None else stretch.block_ids()[0]

    def leading(self, group: int, hashes: Sequence[BlockHash], limit: int, found: array[int] | None = None) -> array[int]:
        """The first blocks of a prefix, up to the first that is missing; of them `found` is known, and gets the others."""
        heads, found = self._heads[group], array("I") if found is None else found
        length = len(found)
        while length < limit and (stretch := heads.get(length, hashes[length])) is not None:
            count = stretch.reach(0, hashes, length, limit)
            found.frombytes(stretch.packed_ids(count))
            length += count
        return found

    def every(self, group: int, hashes: Sequence[BlockHash]) -> list[int | None]:
        """All blocks of a prefix, None for those that are missing."""
        heads, found = self._heads[group], list[int | None]()
        while (block := len(found)) < len(hashes):
            if (stretch := heads.get(block, hashes[block])) is None:
                found.append(None)
            else:
                found += stretch.block_ids()[: stretch.reach(0, hashes, block, len(hashes))]
        return found

    def recall(self, root: BlockHash, tokens: array[int], num_blocks: int) -> tuple[list[BlockHash], array[int]]:
        """The names of the first blocks of a prefix, up to so many, as far as they are known by its tokens; and the blocks."""
        found, block_ids = list[BlockHash](), array("I")
        parent, data, size = root, tokens.tobytes(), self._block_bytes
        while (block := len(found)) < num_blocks:
            stretch = self._beginnings.get(crc32(data[block * size : (block + 1) * size], crc32(parent)))
            if stretch is None or stretch.origin.parent != parent:
                break
            piece = data[block * size : min(num_blocks, block + MAX_STRETCH) * size]
            if not (count := stretch.common_blocks(piece, size)):
                break
            found += unpack_from(count * NAME_FORMAT, stretch.data)
            block_ids.frombytes(stretch.packed_ids(count))
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
            elif (head := heads.get(block, hashes[block])) is not None:
                stretch, offset = head, 0
            else:
                end = self._first_head(heads, hashes, block + 1, stop) if block + 1 < stop else stop
                ids = block_ids if end - block == len(block_ids) else block_ids[block - start : end - start]
                stretch = self._append(stretch, offset, self._family(group, root), hashes, block, ids, tokens)
                new.append((block, end))
                block, offset = end, stretch.num_blocks
        return new

    def insert_alone(self, group: int, root: BlockHash, parent: BlockHash, name: BlockHash, block_id: int) -> bool:
        """Enter a block that nothing follows; whether no other has its name."""
        heads = self._heads[group]
        if heads.get(0, name) is not None:
            return False
        family = self._family(group, root)
        origin = family.origin if parent == root else Origin(family, parent, None)
        stretch = self._of[block_id] = Stretch(origin, (name,), (block_id,))
        heads.add(0, name, stretch)
        family.num_blocks += 1
        return True

    def _family(self, group: int, root: BlockHash) -> Family:
        families = self._families[group]
        if (family := families.get(root)) is None:
            family = families[root] = Family(group, root)
        return family

    def _first_head(self, heads: Heads, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """What is missing ends with a head: a block that follows in a stretch has one before it."""
        for block in range(start + -start % MAX_STRETCH, stop, MAX_STRETCH):
            if heads.get(0, hashes[block]) is not None:
                stop = block
                break
        if not heads.inside or heads.inside.keys().isdisjoint(hashes[start:stop]):
            return stop
        return next(block for block in range(start, stop) if hashes[block] in heads.inside)

    def _append(
        self,
        last: Stretch | None,
        offset: int,
        family: Family,
        hashes: Sequence[BlockHash],
        start: int,
        block_ids: Sequence[int],
        tokens: array[int],
    ) -> Stretch:
        """Enter the blocks of a prefix, at least one, from number `start` on, behind the first `offset` of the stretch `last`: in
        it if it ends there, and in new ones. Returns the last."""
        of, block, stop, stretch = self._of, start, start + len(block_ids), last
        while stretch is None or block < stop:
            end = min(stop, block - block % MAX_STRETCH + MAX_STRETCH)
            ids = block_ids if end - block == len(block_ids) else block_ids[block - start : end - start]
            if stretch is None or not block % MAX_STRETCH or offset < stretch.num_blocks:
                origin = self._origin(family, hashes[block - 1], stretch) if block else family.origin
                stretch = Stretch(origin, hashes[block:end], ids)
                self._heads[family.group].add(block, hashes[block], stretch)
            else:
                stretch.extend(hashes[block:end], ids)
            for block_id in ids:
                of[block_id] = stretch
            block, offset = end, len(stretch.data) // BLOCK_BYTES
            if family.group == self._recalled and (offset >= MIN_RECALLED or stretch.tokens):
                self._learn(stretch, offset, end, tokens)
        family.num_blocks += stop - start
        return stretch

    def _origin(self, family: Family, parent: BlockHash, before: Stretch | None) -> Origin:
        place = parent[0] % NUM_ORIGINS
        origin = self._origins[place]
        if origin is None or origin.before is not before or origin.parent != parent or origin.family is not family:
            origin = self._origins[place] = Origin(family, parent, before)
        return origin

    def _learn(self, stretch: Stretch, count: int, end: int, tokens: array[int]) -> None:
        """The stretch of so many blocks ends before block number `end` of a prefix with these tokens."""
        size = self._block_bytes // tokens.itemsize
        if stretch.tokens:
            stretch.tokens += tokens[(end - count) * size + len(stretch.tokens) // tokens.itemsize : end * size].tobytes()
        else:
            stretch.tokens = tokens[(end - count) * size : end * size].tobytes()
            self._beginnings[self._beginning(stretch)] = stretch

    def _beginning(self, stretch: Stretch) -> int:
        return crc32(stretch.parent + stretch.tokens[: self._block_bytes])

    def replace(self, block_id: int, other: int) -> None:
        """Let `block_id` stand where `other` does, which is taken out."""
        place = self.place(other)
        assert place is not None, f"block {other} is not indexed"
        stretch, offset = place
        stretch.replace(offset, block_id)
        self._of[block_id], self._of[other] = stretch, None

    def remove(self, block_ids: list[int]) -> list[Removed]:
        """Take out different blocks, all of them here, those of one stretch the last first."""
        removed: list[Removed] = []
        left, ends = len(block_ids), block_ids[::-1]
        packed = array("I", ends).tobytes()
        while left:
            stretch = self._of[ends[left - 1]]
            assert stretch is not None, f"one of the blocks {block_ids} is not indexed"
            data = stretch.data
            held = len(data) // BLOCK_BYTES
            size = held if held < left else left
            if not data.endswith(packed[ID_BYTES * (left - size) : ID_BYTES * left]):
                return removed + self._remove_any(block_ids[len(block_ids) - left :])
            removed.append(self._cut(stretch, ends[left - size : left]))
            left -= size
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
        data, family, of = stretch.data, stretch.origin.family, self._of
        count = len(data) // BLOCK_BYTES
        keep = count - len(ends)
        names = data[HASH_BYTES * keep : HASH_BYTES * count]
        for block_id in ends:
            of[block_id] = None
        if keep:
            stretch.shorten(keep, self._block_bytes)
        else:
            if stretch.origin.before is not None:
                stretch.pass_notes_on()
            self._heads[family.group].remove(stretch)
            if stretch.tokens and self._beginnings.get(place := self._beginning(stretch)) is stretch:
                del self._beginnings[place]
            # Those behind it may lead here until they are gone.
            stretch.data = stretch.tokens = b""
        family.num_blocks -= len(ends)
        if not family.num_blocks:
            # A family that leads to itself would stay.
            del self._families[family.group][family.root], family.origin
        return Removed(family.root, names, ends, family.group)

    def _split(self, stretch: Stretch, keep: int) -> None:
        """Let what is behind the first `keep` blocks be a stretch of its own."""
        if keep == stretch.num_blocks:
            return
        behind = stretch.split(keep, self._block_bytes)
        self._heads[stretch.group].inside[behind.name(0)] = behind
        if behind.tokens:
            self._beginnings[self._beginning(behind)] = behind
        for block_id in behind.block_ids():
            self._of[block_id] = behind

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        names: set[tuple[int, BlockHash]] = set()
        for group, heads in enumerate(self._heads):
            heads.check_invariants()
            for stretch in heads:
                count = stretch.num_blocks
                assert 0 < count <= MAX_STRETCH
                assert stretch.origin.family is self._families[group][stretch.root]
                offsets = [note[0] for note in stretch.notes]
                assert len(offsets) == len(set(offsets))
                assert len(stretch.tokens) in (0, self._block_bytes * count)
                assert all(self._of[block_id] is stretch for block_id in stretch.block_ids())
                names.update((group, stretch.name(offset)) for offset in range(count))
        for place, stretch in self._beginnings.items():
            assert stretch.tokens
            assert self._beginning(stretch) == place
            assert self._of[stretch.block_ids()[0]] is stretch
        assert len(names) == sum(stretch.num_blocks for stretch in self) == len(self._of) - self._of.count(None)
        for group, families in enumerate(self._families):
            counts = Counter[BlockHash]()
            for stretch in self._heads[group]:
                counts[stretch.root] += stretch.num_blocks
            assert counts == {root: family.num_blocks for root, family in families.items()}
            assert all((family.group, family.root) == (group, root) for root, family in families.items())
