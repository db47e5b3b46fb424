"""Copy-on-write: which shared blocks are copied before a step because somebody is about to write to them.

A holder that wants to write to a block which others hold too, or which the prefix index names, gets a block of its own; its hold on
the old one goes to the plan and ends when the plan has been carried out, so that the source stays what it is until then (law L4).
This module knows neither requests nor what blocks hold. Invariants: each planned copy holds its source once; a destination is named
by one copy; what has been taken is complete before more is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvist.kv.memory import NO_PLAN, MemoryPlan
from kvist.kv.pool import BlockPool


class Copies:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._planned: list[tuple[int, int]] = []
        self._under_way: list[tuple[int, int]] = []

    @property
    def are_planned(self) -> bool:
        """Whether copies are waiting to be taken: the blocks that they are for hold nothing yet."""
        return bool(self._planned)

    def needed(self, tables: Sequence[array[int]], position: int) -> list[array[int]]:
        """Those of a holder's tables whose block at `position`, inside it, is not the holder's alone. The last of several holders
        writes in place."""
        block, offset = divmod(position, self._block_size)
        return [table for table in tables if self._is_shared(table[block])] if offset else []

    def _is_shared(self, block_id: int) -> bool:
        return self._pool.is_cached(block_id) or self._pool.ref_count(block_id) - self.sources().count(block_id) > 1

    def plan(self, tables: Sequence[array[int]], position: int) -> None:
        """Their holder goes on in copies of the blocks at `position`; there must be as many free blocks."""
        taken = self._pool.take(len(tables))
        assert taken is not None, "room has been asked for"
        for table, block_id in zip(tables, taken, strict=True):
            self._planned.append((table[position // self._block_size], block_id))
            table[position // self._block_size] = block_id

    def withdraw(self, tables: Sequence[array[int]]) -> int:
        """The holder of these tables gives its blocks up: nobody will read what was to be copied into them. The tables come without
        what was let go, whose zeros would name the block 0 of another. Returns how many sources became free."""
        block_ids = {block_id for table in tables for block_id in table}
        dropped = [source for source, destination in self._planned if destination in block_ids]
        self._planned = [copy for copy in self._planned if copy[1] not in block_ids]
        return self._pool.release(dropped)

    def take(self) -> MemoryPlan:
        """What must be copied before the next step; each copy is given out once."""
        if not self._planned:
            return NO_PLAN
        assert not self._under_way, "the last plan is complete before the next one is taken"
        self._under_way, self._planned = self._planned, []
        return MemoryPlan(copies=tuple(self._under_way))

    def complete(self) -> None:
        """What was taken has been carried out, or never will be. Twice is harmless."""
        if self._under_way:
            copies, self._under_way = self._under_way, []
            self._pool.release([source for source, _ in copies])

    def sources(self) -> list[int]:
        """The blocks that plans hold, once for each copy."""
        return [source for copies in (self._planned, self._under_way) for source, _ in copies]
