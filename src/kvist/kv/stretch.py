"""One stretch: successive blocks of one prefix in one KV group, packed, what is noted of their use, and where it begins.

What it is for and where it is found says `kv/stretches.py`. Most requests end where their stretch does, so what is noted of the
last block has a place of its own; what is noted of a block that was taken out belongs to the last one. It knows no other blocks
than its own and the one before it. Invariants: names, tokens (if known) and ids are of the same blocks; other notes than the last
block's are of different blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kvist.kv.block import HASH_BYTES, BlockHash, name_at
from kvist.kv.uses import Notes, noted, within

ID_BYTES = array("I").itemsize
BLOCK_BYTES = HASH_BYTES + ID_BYTES
NAME_FORMAT = f"{HASH_BYTES}s"
"""As `struct` reads one."""


class Family:
    """What has one root in one KV group. Blocks of number 0 begin at its `origin`."""

    __slots__ = ("group", "num_blocks", "origin", "root")

    def __init__(self, group: int, root: BlockHash) -> None:
        self.group, self.root, self.num_blocks = group, root, 0
        self.origin = Origin(self, root, None)


class Origin(NamedTuple):
    """`parent` is the name of the block before some stretches, or the root; that block stood in the stretch `before`, if in one."""

    family: Family
    parent: BlockHash
    before: Stretch | None


class Stretch:
    """Blocks that follow each other behind an origin: at least one, until all are taken out."""

    __slots__ = ("data", "finds", "next", "notes", "origin", "tokens", "used_at")

    def __init__(self, origin: Origin, names: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        self.origin = origin
        """Prompts that share nothing share it: three places that each would pay for."""
        self.next: Stretch | None = None
        """For whoever finds stretches by their heads (`kv/stretch_heads.py`)."""
        self.finds, self.used_at = 0, -inf
        """Noted of the last block."""
        self.notes: Notes = ()
        """Of others, or of blocks that were taken out."""
        self.tokens = b""
        self.data = b"".join([*names, array("I", block_ids).tobytes()])
        """All names, one after the other, and all ids behind them: one object, as a prompt of one block would pay for the head of
        a second one too. What is behind the names is not taken for one, as no two contents have one name."""

    @property
    def num_blocks(self) -> int:
        return len(self.data) // BLOCK_BYTES

    @property
    def group(self) -> int:
        return self.origin.family.group

    @property
    def root(self) -> BlockHash:
        return self.origin.family.root

    @property
    def parent(self) -> BlockHash:
        return self.origin.parent

    def packed_ids(self, count: int) -> bytes:
        """Of the first so many blocks."""
        data = self.data
        begin = len(data) // BLOCK_BYTES * HASH_BYTES
        return data[begin : begin + ID_BYTES * count]

    def block_ids(self) -> array[int]:
        count = self.num_blocks
        return array("I", self.data[HASH_BYTES * count : BLOCK_BYTES * count])

    def name(self, offset: int) -> BlockHash:
        return name_at(self.data, offset)

    def holds(self, offset: int, name: BlockHash) -> bool:
        return self.data.startswith(name, HASH_BYTES * offset)

    def offset_of(self, name: BlockHash) -> int | None:
        """Where the block of this name stands; asked of the last one mostly."""
        data = self.data
        last = len(data) // BLOCK_BYTES - 1
        if data.startswith(name, HASH_BYTES * last):
            return last
        place = data.find(name)
        return None if place < 0 else place // HASH_BYTES

    def extend(self, names: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """More blocks follow the last one, whose notes stay its own."""
        self._keep_notes()
        data, ids = self.data, HASH_BYTES * self.num_blocks
        self.data = b"".join([data[:ids], *names, data[ids:], array("I", block_ids).tobytes()])

    def replace(self, offset: int, block_id: int) -> None:
        """Another block stands there now."""
        ids = self.block_ids()
        ids[offset] = block_id
        self.data = self.data[: HASH_BYTES * len(ids)] + ids.tobytes()

    def shorten(self, keep: int, block_bytes: int) -> None:
        """Only the first so many blocks are left, at least one; what is noted of the last block goes to the last of them. A block's
        tokens take `block_bytes`."""
        self.data = self.data[: HASH_BYTES * keep] + self.packed_ids(keep)
        self.tokens = self.tokens[: block_bytes * keep]

    def split(self, keep: int, block_bytes: int) -> Stretch:
        """What is behind the first `keep` blocks becomes a stretch of its own."""
        self._keep_notes()
        origin = Origin(self.origin.family, self.name(keep - 1), self)
        behind = Stretch(origin, [self.name(offset) for offset in range(keep, self.num_blocks)], self.block_ids()[keep:])
        behind.notes = tuple((offset - keep, finds, used_at) for offset, finds, used_at in self.notes if offset >= keep)
        behind.tokens = self.tokens[block_bytes * keep :]
        self.notes = tuple(note for note in self.notes if note[0] < keep)
        self.shorten(keep, block_bytes)
        return behind

    def reach(self, offset: int, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """How many names from `offset` on are those of the prefix `hashes` from `start` on, up to `stop`."""
        data = self.data
        most = min(len(data) // BLOCK_BYTES - offset, stop - start)
        # Who has one name in common has all before it too.
        if most <= 0 or data.startswith(hashes[start + most - 1], HASH_BYTES * (offset + most - 1)):
            return max(most, 0)
        if not data.startswith(hashes[start], HASH_BYTES * offset):
            return 0
        known = 1
        while known < most:
            middle = (known + most) // 2
            if data.startswith(hashes[start + middle], HASH_BYTES * (offset + middle)):
                known = middle + 1
            else:
                most = middle
        return known

    def common_blocks(self, tokens: bytes, block_bytes: int) -> int:
        """How many leading blocks hold these tokens."""
        theirs, known, most = self.tokens, 0, min(len(tokens), len(self.tokens)) // block_bytes
        if theirs.startswith(tokens) or tokens.startswith(theirs):
            return most
        while known < most:
            middle = (known + most) // 2
            begin, end = known * block_bytes, (middle + 1) * block_bytes
            if theirs[begin:end] == tokens[begin:end]:
                known = middle + 1
            else:
                most = middle
        return known

    def note(self, offset: int, finds: int, used_at: float) -> None:
        """A request found, so many times, or used this block."""
        if offset == len(self.data) // BLOCK_BYTES - 1:
            self.finds += finds
            if used_at > self.used_at:
                self.used_at = used_at
        else:
            self.notes = noted(self.notes, offset, finds, used_at)

    def all_notes(self) -> Notes:
        """One an offset."""
        count = self.num_blocks
        notes = within(self.notes, count) if self.notes else ()
        return notes if self.used_at == -inf else noted(notes, count - 1, self.finds, self.used_at)

    def _keep_notes(self) -> None:
        if self.notes or self.used_at != -inf:
            self.notes, self.finds, self.used_at = self.all_notes(), 0, -inf

    def pass_notes_on(self) -> None:
        """The stretch is about to go: its notes move to the block before it."""
        origin, notes = self.origin, self.all_notes()
        # With nothing to pass on nobody walks: a long prefix may go beginning first.
        while notes and origin.before is not None and not origin.before.data:
            origin = origin.before.origin
        if notes and origin.before is not None:
            # What has been there may be gone, or be another's now; only the head stays the same for good.
            offset = origin.before.offset_of(origin.parent) or 0
            for _, finds, used_at in notes:
                origin.before.note(offset, finds, used_at)
