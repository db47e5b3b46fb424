"""Queues of blocks in runs, and the queues by priority that all eviction policies share.

Blocks that are let go together are found again or reused together, most of them. So a queue (a ring) lists runs and not blocks:
what is done to a whole run costs O(1), and for each block there is one entry, which says in which run it stands. A block that is
taken out of the middle leaves its place in the run's list behind; a list that is half stale is written anew. So all costs are O(1)
a block, amortised, and 4 bytes of list a block become 8 at the most. This module knows neither hashes, requests nor which block is
worth keeping. Invariants: a block stands in at most one run, and `left` counts those that stand in a run; a run with none left is
in no ring; all blocks of a run have one kind and one step; a block that is in no ring keeps its kind.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvist.kv.columns import all_are, gather

ORDINARY_PRIORITY = 50
MAX_PRIORITY = 100
MAX_JOINED = 64
"""Runs that are shorter are made longer, so that blocks let go one by one, or with others that come and go, cost no run each."""


class Run:
    """`kind` is the policy's class of the blocks, `step` its time when they were let go."""

    __slots__ = ("after", "before", "block_ids", "kind", "left", "step")

    def __init__(self, kind: int, step: int) -> None:
        self.kind, self.step, self.left = kind, step, 0
        self.block_ids = array("I")
        """The first to be reused first; with those that have been taken out since, whose place is another run now."""
        self.before = self.after = self


def pieces(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """Each run with how often it follows itself."""
    if runs and all_are(runs, runs[0]):
        yield runs[0], len(runs)
    else:
        for run, same in groupby(runs):
            yield run, len(list(same))


class Rings:
    """Doubly linked lists of runs. A ring is named by a run of its own without blocks, which stands before its first run and after
    its last. Blocks have one of `num_kinds` kinds."""

    def __init__(self, num_blocks: int, num_kinds: int = 1) -> None:
        self._held = [Run(kind, 0) for kind in range(num_kinds)]
        """In no ring: where the blocks of a kind stand that are not queued."""
        self._place = [self._held[0]] * num_blocks

    def open(self) -> Run:
        """A new, empty ring."""
        return Run(0, 0)

    def close(self, ring: Run) -> None:
        """Of an empty ring. A link to itself would keep it alive."""
        del ring.before, ring.after

    def join(self, older: Run, newer: Run) -> None:
        """Put all of `newer` behind all of `older`; `newer` is closed."""
        if newer.after is not newer:
            first, last, end = newer.after, newer.before, older.before
            end.after, first.before = first, end
            last.after, older.before = older, last
        self.close(newer)

    def extend(self, ring: Run, block_ids: Sequence[int], kind: int = 0, step: int = 0) -> None:
        """Put blocks, at least one and all of one kind, behind all of the ring's."""
        run, place = ring.before, self._place
        if run.kind != kind or run.step != step or run.left >= MAX_JOINED or run is ring or not self._ends_clean(run):
            run = Run(kind, step)
            run.before, run.after = ring.before, ring
            ring.before.after = ring.before = run
        run.block_ids.extend(block_ids)
        run.left += len(block_ids)
        for block_id in block_ids:
            place[block_id] = run

    def unlink(self, block_ids: Sequence[int]) -> list[tuple[Run, int]]:
        """Take blocks out of their rings. Of each run so many. Those of a run that goes whole keep their place, as in `take`."""
        place, taken, start = self._place, [], 0
        for run, count in pieces(self.runs_of(block_ids)):
            stop = start + count
            if count == run.left:
                self._drop(run)
            else:
                held = self._held[run.kind]
                for block_id in block_ids[start:stop]:
                    place[block_id] = held
                run.left -= count
                if 2 * run.left < len(run.block_ids):
                    self._tidy(run)
            taken.append((run, count))
            start = stop
        return taken

    def take(self, ring: Run, count: int, taken: list[int]) -> int:
        """Move up to `count` blocks from the ring's head to `taken`; returns how many are still wanted. They keep their place,
        which `runs_of` tells, until something is said of them."""
        while count and (run := ring.after) is not ring:
            if run.left < len(run.block_ids):
                self._tidy(run)
            if run.left <= count:
                taken += run.block_ids.tolist()
                count -= run.left
                self._drop(run)
            else:
                taken += run.block_ids[:count].tolist()
                del run.block_ids[:count]
                run.left -= count
                count = 0
        return count

    def runs_of(self, block_ids: Sequence[int]) -> Sequence[Run]:
        """Where these blocks stand, or stood when they were taken."""
        return gather(self._place, block_ids)

    def set_kind(self, block_ids: Iterable[int], kind: int) -> None:
        """Of blocks that are in no ring."""
        place, held = self._place, self._held[kind]
        for block_id in block_ids:
            place[block_id] = held

    def blocks(self, ring: Run) -> list[int]:
        found: list[int] = []
        run, place = ring.after, self._place
        while run is not ring:
            found += [block_id for block_id in run.block_ids if place[block_id] is run]
            run = run.after
        return found

    def _drop(self, run: Run) -> None:
        """A run has no blocks any more. Its links are cut: what knows it must not keep others alive."""
        run.before.after, run.after.before = run.after, run.before
        del run.before, run.after
        run.left = 0
        run.block_ids = array("I")

    def _ends_clean(self, run: Run) -> bool:
        """Whether a run has no stale entries, but for the last ones, which are forgotten: those may be the ones that are put behind
        it, and no block may stand in a run's list twice."""
        ids, place = run.block_ids, self._place
        while run.left < len(ids) and place[ids[-1]] is not run:
            ids.pop()
        return run.left == len(ids)

    def _tidy(self, run: Run) -> None:
        """Forget stale entries."""
        place = self._place
        run.block_ids = array("I", [block_id for block_id in run.block_ids if place[block_id] is run])


class Prioritized:
    """What all policies share: one ring for each priority in use, and the priority of each block."""

    def __init__(self, num_blocks: int, num_kinds: int = 1) -> None:
        self._rings = Rings(num_blocks, num_kinds)
        self._priority = bytearray([ORDINARY_PRIORITY]) * num_blocks
        self._level = {ORDINARY_PRIORITY: self._rings.open()}
        self._levels = [ORDINARY_PRIORITY]
        """The priorities in use, ascending."""

    def push(self, block_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def set_priority(self, block_id: int, priority: int, *, linked: bool = False) -> None:
        """`linked`: the block is in a ring, and goes to the end of another."""
        assert 0 <= priority <= MAX_PRIORITY
        if linked:
            self._rings.unlink([block_id])
        if priority not in self._level:
            self._level[priority] = self._rings.open()
            self._levels = sorted(self._level)
        self._priority[block_id] = priority
        if linked:
            self.push([block_id])

    def drop(self, block_ids: Sequence[int]) -> None:
        self._rings.unlink(block_ids)

    def unlink(self, block_ids: Sequence[int]) -> None:
        self._rings.unlink(block_ids)

    def succeed(self, block_id: int, other: int) -> None:
        (run,) = self._rings.runs_of((other,))
        self._rings.unlink((other,))
        self._rings.set_kind((block_id,), run.kind)
