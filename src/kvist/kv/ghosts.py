"""What is remembered of evicted blocks: by content, in bounded memory, until another content takes the place.

The table has one place for a content, which newer ghosts overwrite: so some are lost early, and two contents with one place and 24
equal bits more are taken for each other. That spoils a guess or an explanation and never an answer, as nothing here is ever a hit.
A content that is computed again keeps its ghost until it is evicted again; who asks looks into the prefix index first.

A ghost is one number of 64 bits, so that it takes one line of memory: 24 bits of the name, which tell contents of one place apart
(0, a name that is not remembered: no ghost), the memo, and the time in ticks, which begins anew after 24 days. What can be done for
many names at once is done on their bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import Struct, pack, unpack

from kvist.kv.block import HASH_BYTES, BlockHash
from kvist.kv.columns import all_are, gather

MEMO_BITS = 17
TICK_BITS = 23
NOTE_BITS = MEMO_BITS + TICK_BITS
NOTE_BYTES = NOTE_BITS // 8
LAST_TICK = (1 << TICK_BITS) - 1
TICKS_PER_SECOND = 4
AT_ONCE = 64
STRIDE = 16
"""Of blocks that go together the first leaves a ghost, and every so many-th behind it, where there are no memos to keep."""
STRIDE_BYTES = STRIDE * HASH_BYTES
first_8 = Struct("<Q").unpack_from
PROBE = 4
"""Of many contents every so many-th is looked for first: a prefix that is remembered at all is so in most of its blocks."""


def num_places(wanted: int) -> int:
    """The power of two nearest to it: then a place is some bits of a name."""
    return 1 << (4 * wanted // 3).bit_length() - 1


class Ghosts:
    """About `wanted` places of 8 bytes, at most 1.34 and at least 0.67 times as many."""

    def __init__(self, wanted: int) -> None:
        self._ghosts = array("Q", bytes(8 * num_places(wanted)))
        self._mask = (len(self._ghosts) - 1).to_bytes(4, "little")
        self._new: list[tuple[bytes, bytes]] = []
        self._num_new = 0
        self._new_some: list[tuple[bytes, float]] = []
        """Not in the table yet: one by one it would cost several times as much."""
        self._at_once = min(AT_ONCE, max(1, len(self._ghosts) // AT_ONCE))

    def put(self, names: bytes, memos: Sequence[int], now: float) -> None:
        """These contents, whose names stand one after the other, are evicted at `now`, in seconds. A memo is a whole number of
        MEMO_BITS."""
        tick = int(now * TICKS_PER_SECOND) & LAST_TICK
        self._new.append((names, pack(f"<{len(memos)}Q", *[memo << TICK_BITS | tick for memo in reversed(memos)])))
        self._num_new += len(memos)
        if self._num_new >= self._at_once:
            self._write()

    def put_some(self, names: bytes, now: float) -> None:
        """The same of the first of these contents and every STRIDE-th behind it, with the memo 0."""
        self._new_some.append((names, now))
        if len(self._new_some) >= self._at_once:
            self._write()

    def _write(self) -> None:
        """Enter what is new into the table."""
        if self._new:
            self._write_all()
        ghosts, mask = self._ghosts, len(self._ghosts) - 1
        for names, now in self._new_some:
            tick = int(now * TICKS_PER_SECOND) & LAST_TICK
            for begin in range((len(names) - 1) // STRIDE_BYTES * STRIDE_BYTES, -1, -STRIDE_BYTES):
                (name,) = first_8(names, begin)
                ghosts[name & mask] = (name >> 32 & 0xFFFFFF) << NOTE_BITS | tick
        self._new_some.clear()

    def _write_all(self) -> None:
        beginnings, packed, count, ghosts = array("Q"), bytearray(), self._num_new, self._ghosts
        for names, notes in self._new:
            # The last first: of two with one place the one before the other in its prefix stays.
            beginnings += array("Q", names)[:: HASH_BYTES // 8][::-1]
            packed += notes
        data = beginnings.tobytes()
        for byte in range(NOTE_BYTES, 8):
            packed[byte::8] = data[byte - 1 :: 8]
        for place, ghost in zip(self._places(data, count), unpack(f"<{count}Q", packed), strict=True):
            ghosts[place] = ghost
        self._new.clear()
        self._num_new = 0

    def memos(self, block_hashes: Sequence[BlockHash]) -> list[int | None]:
        """Of each content the memo, None if it is not remembered. Of successive blocks of one sequence, none may be told where few
        are remembered."""
        self._write()
        if len(block_hashes) > PROBE and all_are(self._notes(block_hashes[::PROBE]), None):
            return [None] * len(block_hashes)
        return [None if note is None else note >> TICK_BITS for note in self._notes(block_hashes)]

    def evicted_ago(self, block_hashes: Sequence[BlockHash], now: float) -> float | None:
        """How many seconds ago the first of these contents of which that is remembered was evicted last."""
        self._write()
        note = next((note for note in self._notes(block_hashes) if note is not None), None)
        return None if note is None else (int(now * TICKS_PER_SECOND) - note & LAST_TICK) / TICKS_PER_SECOND

    def _notes(self, block_hashes: Sequence[BlockHash]) -> list[int | None]:
        count = len(block_hashes)
        if not count:
            return []
        data = array("Q", b"".join(block_hashes))[:: HASH_BYTES // 8].tobytes()
        tags = array("I", data)[1::2]
        if sys.byteorder == "big":
            tags.byteswap()
        return [
            ghost & (1 << NOTE_BITS) - 1 if ghost >> NOTE_BITS == tag & 0xFFFFFF and ghost >> NOTE_BITS else None
            for ghost, tag in zip(gather(self._ghosts, self._places(data, count)), tags, strict=True)
        ]

    def _places(self, data: bytes, count: int) -> tuple[int, ...]:
        """Of the beginnings of names: some of the first four bytes of each."""
        words = int.from_bytes(array("I", data)[::2].tobytes(), "little") & int.from_bytes(self._mask * count, "little")
        return unpack(f"<{count}I", words.to_bytes(4 * count, "little"))
