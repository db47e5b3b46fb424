"""How often each cached prefix was found, and when it was used last: noted once a request, at the block where its hit ended.

A request that found a block has found all before it, so a block's finds are those noted at it and at all blocks behind it:
whoever asks adds them up, and a request costs O(1) however long its prefix is. The notes of blocks that are taken out go to the
block before them (`kv/stretch.py`). This module knows no blocks but by the place in a stretch, and reads no clock.
"""

from __future__ import annotations

Note = tuple[int, int, float]
"""Of a block: its offset in a stretch, how many finds ended there, and the last of these or another use."""
Notes = tuple[Note, ...]
"""One an offset at most, of few."""


def noted(notes: Notes, offset: int, finds: int, used_at: float) -> Notes:
    """With so many finds more, of which the last, or another use, was at `used_at`."""
    for place, note in enumerate(notes):
        if note[0] == offset:
            new = (offset, finds + note[1], max(used_at, note[2]))
            return (*notes[:place], new, *notes[place + 1 :]) if len(notes) > 1 else (new,)
    return (*notes, (offset, finds, used_at))


def within(notes: Notes, count: int) -> Notes:
    """Of the first `count` blocks: what is noted of others goes to the last of them."""
    found: Notes = ()
    for offset, finds, used_at in notes:
        found = noted(found, min(offset, count - 1), finds, used_at)
    return found
