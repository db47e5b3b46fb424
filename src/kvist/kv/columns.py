"""Reading many entries of one column at once.

Bookkeeping is struct-of-arrays: a column has an entry a block. What is asked of a run of blocks costs half as much in one call as
block by block. This module knows no column's meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TypeVar

Entry = TypeVar("Entry")


def gather(column: Sequence[Entry], ids: Sequence[int]) -> Sequence[Entry]:
    """The entries of these ids, in their order."""
    if len(ids) > 1:
        entries: tuple[Entry, ...] = itemgetter(*ids)(column)
        return entries
    return (column[ids[0]],) if ids else ()


def all_are(entries: Sequence[Entry], entry: Entry) -> bool:
    return entries.count(entry) == len(entries)
