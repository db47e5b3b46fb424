"""What is remembered of evicted blocks: by content, in bounded memory, until another content takes the place.

The table has one place for a content, which newer ghosts overwrite: so some are lost early, and two contents with one place and 32
equal bits more are taken for each other. That spoils a guess or an explanation and never an answer, as nothing here is ever a hit.
A content that is computed again keeps its ghost until it is evicted again; who asks looks into the prefix index first.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from kvist.kv.block import BlockHash

HIGH = int(sys.byteorder == "little")
"""Where the higher 32 bits of 64 stand, in words of 32."""


def _names(block_hashes: Sequence[BlockHash]) -> tuple[array[int], array[int]]:
    """Of each hash the first eight bytes, which choose the place, and their higher half, which tells those of one place apart."""
    data = b"".join(block_hashes)
    return array("Q", data)[::4], array("I", data)[HIGH::8]


class Ghosts:
    """`num_places` places of 12 bytes."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._ghosts = array("Q", bytes(8 * num_places))
        """High half: bits of the name (0, a name that is not remembered: no ghost); low half: the memo."""
        self._times = array("f", bytes(4 * num_places))

    def put(self, block_hashes: Sequence[BlockHash], memos: Sequence[int], now: float) -> None:
        """These contents are evicted at `now`. A memo is a whole number below 2**32."""
        ghosts, times, num_places = self._ghosts, self._times, self._num_places
        names, tags = _names(block_hashes)
        halves = array("I", bytes(8 * len(names)))
        halves[HIGH::2], halves[1 - HIGH :: 2] = tags, array("I", memos)
        for name, ghost in zip(names, array("Q", halves.tobytes()), strict=True):
            place = name % num_places
            ghosts[place] = ghost
            times[place] = now

    def memos(self, block_hashes: Sequence[BlockHash]) -> list[int | None]:
        """Of each content the memo, None if it is not remembered."""
        ghosts, num_places = self._ghosts, self._num_places
        return [
            ghost & 0xFFFFFFFF if (ghost := ghosts[name % num_places]) >> 32 == tag and tag else None
            for name, tag in zip(*_names(block_hashes), strict=True)
        ]

    def evicted_at(self, block_hash: BlockHash) -> float | None:
        """When the content was evicted last (in 32 bits of precision), if that is remembered."""
        return None if self.memos([block_hash])[0] is None else self._times[_names([block_hash])[0][0] % self._num_places]
