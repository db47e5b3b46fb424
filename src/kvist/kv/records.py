"""What the paged manager knows of one open request: the names of its blocks, which ones it holds, and what it has let go.

It knows no pool. Invariants: all tables have one length; the first `let_go[g]` entries of group g's are 0, all others blocks that
the request holds; what is committed is in the tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist.kv.names import Record, empty_tables


@dataclass(slots=True)
class PagedRecord(Record):
    let_go: list[int] = field(default_factory=list)
    """Per group, how many leading entries hold no block (any more)."""
    shares_tail: bool = False
    """The block of the next row may have to be copied before it is written."""
    has_doubles: bool = False
    """Some of what is committed had no name when it was: the second blocks of their contents."""
    retained: bool = False
    """The request's own wishes have been entered."""

    def held(self) -> list[array[int]]:
        """Per group, the blocks that the request holds."""
        return [table[first:] for table, first in zip(self.tables, self.let_go, strict=True)]

    def cut(self, ends: Sequence[int]) -> None:
        """Of each group g the entries before `ends[g]`, at least `let_go[g]`, are let go."""
        for table, start, end in zip(self.tables, self.let_go, ends, strict=True):
            for block in range(start, end):
                table[block] = 0
        self.let_go = list(ends)

    def clear(self) -> None:
        """All are let go, and none is committed. New tables: the step that is under way may still read the old ones."""
        self.tables, self.let_go = empty_tables(len(self.tables)), [0] * len(self.tables)
        self.num_committed, self.shares_tail, self.has_doubles = 0, False, False

    def check_tables(self) -> None:
        for table, let_go in zip(self.tables, self.let_go, strict=True):
            assert len(table) == len(self.tables[0])
            assert 0 <= let_go <= len(table)
            assert not any(table[:let_go])
        assert self.num_committed <= len(self.tables[0])
