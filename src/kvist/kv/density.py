"""The eviction policy `density`: a cached block is worth what it is expected to be hit for the time it has to be kept.

`ReuseStatistics` learns, `Density` keeps the order. They count time in blocks let go, and know neither clocks, hashes nor requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvist.kv.rings import ORDINARY_PRIORITY, Prioritized

NUM_CLASSES = 6
"""Contents used once, twice, ... and NUM_CLASSES times or more."""
AGE_CELLS = 28
"""Two for each doubling of age, up to 2**14 steps, which are 256 times the pool."""
STEPS_PER_POOL = 64
"""How finely time is cut; finer would cost more orderings a block."""
JOIN = 3
"""Two rings are joined when they are this many times as old as both together are long, so that their age is known to a third."""
LESSON_STEPS = 16
MEMORY = 256
"""After this many times the pool what was learned counts half."""
PRIOR_WEIGHT = 256.0
_PRIOR_SHAPE = tuple(0.9**cell for cell in range(AGE_CELLS))
PRIOR = tuple(
    tuple(PRIOR_WEIGHT * (1.0 - 0.75 ** (uses + 1)) * part / sum(_PRIOR_SHAPE) for part in _PRIOR_SHAPE)
    for uses in range(NUM_CLASSES)
)
"""What is believed before anything is learned, as if `PRIOR_WEIGHT` blocks of each class had been seen: a quarter of what is used
once comes back, more of what was used more often, and at any doubling of age nearly alike. By that alone the order is that of LRU,
with content that was used more often kept longer."""
STEP_MASK = (1 << 29) - 1
"""A memo has room for this much of a step besides the class."""


def age_cell(steps: int) -> int:
    """The cell of an age: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ..."""
    if steps < 2:
        return steps
    level = steps.bit_length() - 1
    return min(AGE_CELLS - 1, 2 * level + (steps >> (level - 1) & 1))


def _cell_start(cell: int) -> int:
    return cell if cell < 2 else (2 + cell % 2) << (cell // 2 - 1)


CELL_WIDTHS = tuple(_cell_start(cell + 1) - _cell_start(cell) for cell in range(AGE_CELLS))


CELLS = bytes(map(age_cell, range(1 << 10)))
"""Of the most frequent ages."""


class ReuseStatistics:
    """When blocks of each class come back. `kept` and `returned` fade, so that old habits are forgotten."""

    def __init__(self) -> None:
        self.returned = [[0.0] * AGE_CELLS for _ in range(NUM_CLASSES)]
        """Per class and age: how many came back."""
        self.kept = [0.0] * NUM_CLASSES
        """Per class: how many were let go."""
        self.worth = [[0.0] * AGE_CELLS for _ in range(NUM_CLASSES)]
        self.learn()

    def fade(self, factor: float) -> None:
        self.kept = [factor * value for value in self.kept]
        for row in self.returned:
            row[:] = [factor * value for value in row]

    def learn(self) -> None:
        """Work out `worth`: per class and age the best ratio of expected hits to expected time over all moments to give up."""
        for kind in range(NUM_CLASSES):
            left = self.kept[kind] + PRIOR_WEIGHT
            hits, time = [], []
            for returned, prior, width in zip(self.returned[kind], PRIOR[kind], CELL_WIDTHS, strict=True):
                come = returned + prior
                hits.append(come)
                time.append(max(left - come / 2, prior) * width)
                left -= come
            # Going back over the cells, joined cells are those up to the best moment to give up: one more is joined with those that
            # follow as long as they bring more for their time than it does.
            worth, joined = self.worth[kind], list[tuple[float, float]]()
            for cell in range(AGE_CELLS - 1, -1, -1):
                sum_hits, sum_time = hits[cell], time[cell]
                while joined and joined[-1][0] * sum_time > sum_hits * joined[-1][1]:
                    more_hits, more_time = joined.pop()
                    sum_hits += more_hits
                    sum_time += more_time
                joined.append((sum_hits, sum_time))
                worth[cell] = sum_hits / sum_time


class Density(Prioritized):
    """The block that is least likely to be hit, for the time that it would have to be kept, goes first.

    Blocks are told apart by how often their content was used (`NUM_CLASSES`) and by the time since. `ReuseStatistics` learns for
    each class at which age such blocks come back, from those that were evicted meanwhile too, and says what keeping a block is
    worth: the most hits per block and time that keeping it from now on, until the best moment to give up, can bring (a Gittins
    index; hit density: Beckmann, Chen and Cidon, "LHD", NSDI 2018, who estimate it differently and sample their victims). So a
    fresh prompt gives way to one that was used twice, but not to one that should have come back long ago; what the pool is too
    small to keep until its return is let go early instead of pushing out the rest.

    Time is counted in blocks let go, in steps of 1/64 of the pool. The ordinary blocks of a class that were let go in one step
    share a ring; neighbouring rings are joined as they grow old, so that their number is logarithmic in age and no block is ever
    moved. Rings are put in the order of their worth once a step. Equal worth: the older ring first.
    """

    remembers = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses = bytearray(num_blocks)
        self._since = array("I", bytes(4 * num_blocks))
        self._step_blocks = max(1, num_blocks // STEPS_PER_POOL)
        self._step = self._started = self._next_lesson = 0
        self._pushed = 0
        self._statistics = ReuseStatistics()
        self._young = [self._rings.open() for _ in range(NUM_CLASSES)]
        self._old: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_CLASSES)]
        """Per class, oldest first: (ring, step of its oldest block, step of its newest)."""
        self._victims: list[int] = []
        """The rings that may have blocks to reuse, those of least worth last; pop drops those it has emptied. Empty until the first
        pop of a step."""

    def push(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        uses, since, step, kept = self._uses, self._since, self._step, self._statistics.kept
        for block_id in block_ids:
            since[block_id] = step
        if len(self._levels) == 1:
            for kind, alike in groupby(block_ids, uses.__getitem__):
                ids = list(alike)
                kept[kind] += len(ids)
                self._rings.extend(self._young[kind], ids)
        else:
            for block_id in block_ids:
                kind, priority = uses[block_id], self._priority[block_id]
                kept[kind] += 1
                self._rings.extend(self._young[kind] if priority == ORDINARY_PRIORITY else self._level[priority], (block_id,))
        self._pushed += len(block_ids)
        if self._pushed >= self._step_blocks:
            self._step += self._pushed // self._step_blocks
            self._pushed %= self._step_blocks
            self._grow_older()

    def unlink(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        self._rings.unlink(block_ids)
        uses, since, step, returned = self._uses, self._since, self._step, self._statistics.returned
        # Most go together as they came, and are counted together.
        last_since = last_kind = -1
        count = 0.0
        for block_id in block_ids:
            if since[block_id] != last_since or uses[block_id] != last_kind:
                if count:
                    returned[last_kind][age_cell(step - last_since)] += count
                last_since, last_kind, count = since[block_id], uses[block_id], 0.0
            count += 1.0
        if count:
            returned[last_kind][age_cell(step - last_since)] += count

    def pop(self, count: int) -> list[int]:
        taken: list[int] = []
        for priority in self._levels:
            if priority == ORDINARY_PRIORITY:
                victims = self._victims = self._victims or self._ranked()[::-1]
                while victims and count:
                    count = self._rings.take(victims[-1], count, taken)
                    if count:
                        victims.pop()
                if count:
                    self._victims = self._ranked()[::-1]
                    for ring in reversed(self._victims):
                        count = self._rings.take(ring, count, taken)
            else:
                count = self._rings.take(self._level[priority], count, taken)
            if not count:
                break
        assert not count, "there are as many blocks as are asked for"
        return taken

    def order(self) -> list[int]:
        found = []
        for priority in self._levels:
            rings = self._victims[::-1] if priority == ORDINARY_PRIORITY else [self._level[priority]]
            if priority == ORDINARY_PRIORITY:
                rings += [ring for ring in self._ranked() if ring not in self._victims]
            for ring in rings:
                found += self._rings.blocks(ring)
        return found

    def hit(self, block_ids: Iterable[int]) -> None:
        uses = self._uses
        for block_id in block_ids:
            kind = uses[block_id]
            if kind < NUM_CLASSES - 1:
                uses[block_id] = kind + 1

    def enter(self, block_ids: Sequence[int], memos: Sequence[int | None]) -> None:
        """Whoever computed a block has computed those before it too: what is not remembered of one is known from the next."""
        uses, returned, now = self._uses, self._statistics.returned, self._step
        if memos.count(None) == len(memos):
            for block_id in block_ids:
                uses[block_id] = 0
            return
        memo: int | None = None
        for block_id, own in zip(reversed(block_ids), reversed(memos), strict=True):
            if own is not None and (memo is None or own & 7 >= memo & 7):
                memo = own
            if memo is None:
                uses[block_id] = 0
            else:
                kind = memo & 7
                returned[kind][age_cell((now - (memo >> 3)) & STEP_MASK)] += 1.0
                uses[block_id] = kind + 1 if kind < NUM_CLASSES - 1 else kind

    def leave(self, block_ids: Sequence[int]) -> Sequence[int]:
        since, uses = self._since, self._uses
        return [(since[block_id] & STEP_MASK) << 3 | uses[block_id] for block_id in block_ids]

    def _grow_older(self) -> None:
        """A step has passed: close the young rings, join old neighbours, and put all rings in order."""
        rings, now = self._rings, self._step
        for kind, old in enumerate(self._old):
            ring = self._young[kind]
            kept: list[tuple[int, int, int]] = []
            for entry in [*old, (ring, self._started, now - 1)]:
                if rings.next[entry[0]] == entry[0]:
                    rings.close(entry[0])
                elif kept and JOIN * (entry[2] - kept[-1][1]) <= now - entry[2]:
                    rings.join(kept[-1][0], entry[0])
                    kept[-1] = (kept[-1][0], kept[-1][1], entry[2])
                else:
                    kept.append(entry)
            self._old[kind] = kept
            self._young[kind] = rings.open()
        self._started = now
        if now >= self._next_lesson:
            self._next_lesson = now + LESSON_STEPS
            self._statistics.learn()
            if sum(self._statistics.kept) > MEMORY * self._rings.num_blocks:
                self._statistics.fade(0.5)
        self._victims = []

    def _ranked(self) -> list[int]:
        """All rings of ordinary blocks, the least worth first."""
        worth, now, cells = self._statistics.worth, self._step, CELLS
        ranked = [(worth[kind][0], now, ring) for kind, ring in enumerate(self._young)]
        for values, old in zip(worth, self._old, strict=True):
            for ring, first, last in old:
                age = now - (first + last) // 2
                ranked.append((values[cells[age] if age < len(cells) else age_cell(age)], first, ring))
        ranked.sort()
        return [ring for _, _, ring in ranked]
