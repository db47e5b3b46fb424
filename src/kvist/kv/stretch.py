"""One stretch: successive blocks of one prefix in one KV group, packed, and what is noted of their use.

What it is for and where it is found says `kv/stretches.py`. Most requests end where their stretch does, so what is noted of the
last block has a place of its own; what is noted of a block that was taken out belongs to the last one. It knows no other blocks
than its own and the one before it. Invariants: names, tokens (if known) and ids are of the same blocks; other notes than the last
block's are of different blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf

from kvist.kv.block import HASH_BYTES, BlockHash, name_at
from kvist.kv.uses import Notes, noted, within

ID_BYTES = array("I").itemsize


class Stretch:
    """`parent` is the name of the block before its head, or the root; that block stood in the stretch `before`, if in one."""

    __slots__ = (
        "before",
        "finds",
        "group",
        "names",
        "notes",
        "packed_ids",
        "parent",
        "root",
        "tokens",
        "used_at",
    )

    def __init__(self, group: int, root: BlockHash, parent: BlockHash, before: Stretch | None = None) -> None:
        self.group, self.root, self.parent, self.before = group, root, parent, before
        self.finds, self.used_at = 0, -inf
        """Noted of the last block."""
        self.notes: Notes = ()
        """Of others, or of blocks that were taken out."""
        self.names = self.tokens = self.packed_ids = b""
        """One after the other."""

    @property
    def num_blocks(self) -> int:
        return len(self.packed_ids) // ID_BYTES

    def block_ids(self) -> array[int]:
        return array("I", self.packed_ids)

    def name(self, offset: int) -> BlockHash:
        return name_at(self.names, offset)

    def holds(self, offset: int, name: BlockHash) -> bool:
        return self.names.startswith(name, HASH_BYTES * offset)

    def offset_of(self, name: BlockHash) -> int | None:
        """Where the block of this name stands; asked of the last one mostly."""
        place = len(self.names) - HASH_BYTES if self.names.endswith(name) else self.names.find(name)
        return None if place < 0 else place // HASH_BYTES

    def reach(self, offset: int, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """How many names from `offset` on are those of the prefix `hashes` from `start` on, up to `stop`."""
        most = min(self.num_blocks - offset, stop - start)
        if most <= 0 or not self.holds(offset, hashes[start]):
            return 0
        if self.holds(offset + most - 1, hashes[start + most - 1]):
            return most
        known, names = 1, self.names
        while known < most:
            middle = (known + most) // 2
            if names.startswith(hashes[start + middle], HASH_BYTES * (offset + middle)):
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
        if offset == self.num_blocks - 1:
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

    def keep_notes(self) -> None:
        """More blocks are about to follow the last one: its notes stay its own."""
        if self.notes or self.used_at != -inf:
            self.notes, self.finds, self.used_at = self.all_notes(), 0, -inf

    def pass_notes_on(self) -> None:
        """The stretch is about to go: its notes move to the block before it."""
        behind, notes = self, self.all_notes()
        # With nothing to pass on nobody walks: a long prefix may go beginning first.
        while notes and behind.before is not None and not behind.before.packed_ids:
            behind = behind.before
        if notes and (target := behind.before) is not None:
            # What has been there may be gone, or be another's now; only the head stays the same for good.
            offset = target.offset_of(behind.parent) or 0
            for _, finds, used_at in notes:
                target.note(offset, finds, used_at)
