"""The eviction policy `density`: a cached block is worth what it is expected to be hit for the time it has to be kept.

`ReuseStatistics` learns, `Density` keeps the order. They count time in blocks let go, and know neither clocks, hashes nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvist.kv.columns import all_are
from kvist.kv.ghosts import MEMO_BITS
from kvist.kv.rings import ORDINARY_PRIORITY, Prioritized, Run, pieces

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
STEP_MASK = (1 << MEMO_BITS - 3) - 1
"""A memo has room for this much of a step besides the class. What is older than that by the time it comes back is taken for young:
hardly any ghost lasts through 256 pools of blocks."""


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
        """Work out `worth`: per class and age the best ratio of expected hits to expected time over all moments to give up, and no
        less than that of a lower class. Whoever used a block has used all before it, so what is let go together is of no higher
        class towards its end, and goes from there inwards."""
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
            if kind:
                worth[:] = map(max, worth, self.worth[kind - 1])


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
        super().__init__(num_blocks, NUM_CLASSES)
        self._num_blocks = num_blocks
        self._step_blocks = max(1, num_blocks // STEPS_PER_POOL)
        self._step = self._started = self._next_lesson = 0
        self._pushed = 0
        self._statistics = ReuseStatistics()
        self._young = [self._rings.open() for _ in range(NUM_CLASSES)]
        self._old: list[list[tuple[Run, int, int]]] = [[] for _ in range(NUM_CLASSES)]
        """Per class, oldest first: (ring, step of its oldest block, step of its newest)."""
        self._victims: list[Run] = []
        """The rings that may have blocks to reuse, those of least worth last; pop drops those it has emptied. Empty until the first
        pop of a step."""

    def push(self, block_ids: Sequence[int]) -> None:
        step, kept, start = self._step, self._statistics.kept, 0
        for run, count in pieces(self._rings.runs_of(block_ids)):
            ids, kind = block_ids[start : start + count], run.kind
            kept[kind] += count
            start += count
            if len(self._levels) == 1:
                self._rings.extend(self._young[kind], ids, kind, step)
            else:
                for priority, level in groupby(ids, self._priority.__getitem__):
                    ring = self._young[kind] if priority == ORDINARY_PRIORITY else self._level[priority]
                    self._rings.extend(ring, list(level), kind, step)
        self._pushed += len(block_ids)
        if self._pushed >= self._step_blocks:
            self._step += self._pushed // self._step_blocks
            self._pushed %= self._step_blocks
            self._grow_older()

    def unlink(self, block_ids: Sequence[int]) -> None:
        for run, count in self._rings.unlink(block_ids):
            self._statistics.returned[run.kind][age_cell(self._step - run.step)] += count

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

    def hit(self, block_ids: Sequence[int]) -> None:
        start = 0
        for run, count in pieces(self._rings.runs_of(block_ids)):
            if run.kind < NUM_CLASSES - 1:
                self._rings.set_kind(block_ids[start : start + count], run.kind + 1)
            start += count

    def enter(self, block_ids: Sequence[int], memos: Sequence[int | None]) -> None:
        """Whoever computed a block has computed those before it too: what is not remembered of one is known from the next."""
        self._rings.set_kind(block_ids, 0)
        if all_are(memos, None):
            return
        returned, now = self._statistics.returned, self._step
        memo: int | None = None
        for block_id, own in zip(reversed(block_ids), reversed(memos), strict=True):
            if own is not None and (memo is None or own & 7 >= memo & 7):
                memo = own
            if memo is not None:
                kind = memo & 7
                returned[kind][age_cell((now - (memo >> 3)) & STEP_MASK)] += 1.0
                self._rings.set_kind((block_id,), min(kind + 1, NUM_CLASSES - 1))

    def leave(self, block_ids: Sequence[int]) -> Sequence[int]:
        memos: list[int] = []
        for run, count in pieces(self._rings.runs_of(block_ids)):
            memos += [(run.step & STEP_MASK) << 3 | run.kind] * count
        return memos

    def _grow_older(self) -> None:
        """A step has passed: close the young rings, join old neighbours, and put all rings in order."""
        rings, now = self._rings, self._step
        for kind, old in enumerate(self._old):
            ring = self._young[kind]
            kept: list[tuple[Run, int, int]] = []
            for entry in [*old, (ring, self._started, now - 1)]:
                if entry[0].after is entry[0]:
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
            if sum(self._statistics.kept) > MEMORY * self._num_blocks:
                self._statistics.fade(0.5)
        self._victims = []

    def _ranked(self) -> list[Run]:
        """All rings of ordinary blocks, the least worth first."""
        worth, now, cells = self._statistics.worth, self._step, CELLS
        ranked = [(worth[kind][0], now, kind, ring) for kind, ring in enumerate(self._young)]
        for kind, old in enumerate(self._old):
            for ring, first, last in old:
                age = now - (first + last) // 2
                ranked.append((worth[kind][cells[age] if age < len(cells) else age_cell(age)], first, kind, ring))
        ranked.sort()
        return [ring for _, _, _, ring in ranked]
