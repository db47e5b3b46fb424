"""One span of addresses for all, with physical memory where it is in use (vAttention, Prabhu et al. 2024, sections 5 and 6).

The addresses are divided into slots of one length, as many as requests may run and a few more. A request gets a slot, so its block
ids are consecutive, and memory pages are committed as it grows. The blocks of a request that has ended are kept in its slot, so
that others can copy a common prefix out of them, until pages or slots run out: then the slot longest unused is given up. Pages are
counted here; that a page is committed when it is first written, and released when the arena is told so, is the system's part.

Each run begins on a page, so no page belongs to two runs. Invariants: a slot is empty, open or kept; the pages of open and kept
slots are at most the budget; a page is counted exactly while a block in use touches it.
"""

from __future__ import annotations

from collections import OrderedDict
from math import gcd

from kvist.kv.spans import OnEvict, Span


class VirtualSpans:
    """`num_blocks` blocks of `block_bytes` have physical memory at once, in pages of `page_bytes`. A slot has `num_groups` runs of
    at least `length` blocks; `num_slots` may be open at once. `num_kept_slots`: closed slots whose blocks are kept (0: none)."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        block_bytes: int,
        *,
        length: int,
        num_slots: int,
        num_kept_slots: int,
        page_bytes: int,
        on_evict: OnEvict,
    ) -> None:
        step = page_bytes // gcd(block_bytes, page_bytes)
        self._run = -(-length // step) * step
        self._slot = self._run * num_groups
        self.num_ids = self._slot * (num_slots + num_kept_slots)
        self._num_blocks = num_blocks
        self._block_bytes, self._page_bytes = block_bytes, page_bytes
        # The last page of each run may be used in part: a request of the largest size must fit all the same.
        largest = num_groups * -(-(num_blocks // num_groups) * block_bytes // page_bytes)
        self._budget = max(largest, num_blocks * block_bytes // page_bytes)
        self._max_kept = num_kept_slots
        self._on_evict = on_evict
        self._empty = list(range(num_slots + num_kept_slots - 1, -1, -1))
        self._open: set[Span] = set()
        self._kept: OrderedDict[int, Span] = OrderedDict()
        self._pinned: set[int] = set()
        self._open_pages = 0
        self._kept_pages = 0
        self._releases: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return max(0, self._num_blocks - -(-self._open_pages * self._page_bytes // self._block_bytes))

    @property
    def num_kept(self) -> int:
        return sum(span.end - begin for span in self._kept.values() for begin in span.begin)

    @property
    def reserved_bytes(self) -> int:
        return len(self._open) * self._slot * self._block_bytes

    @property
    def committed_bytes(self) -> int:
        return (self._open_pages + self._kept_pages) * self._page_bytes

    @property
    def held_bytes(self) -> int:
        return self._open_pages * self._page_bytes

    @property
    def external_fragmentation(self) -> float:
        return 0.0

    def can_open(self, length: int, num_blocks: int, keep: tuple[int, ...]) -> bool:
        kept = {self._slot_of(block_id) for block_id in keep} | self._pinned
        pinned_pages = sum(self._span_pages(self._kept[slot]) for slot in kept if slot in self._kept)
        if not self._empty and all(slot in kept for slot in self._kept):
            return False
        return self._pages(0, num_blocks) * (self._slot // self._run) + pinned_pages <= self._budget - self._open_pages

    def open(self, length: int) -> Span | None:
        assert length <= self._run, "no request is longer than a slot"
        if not self._empty and not self._give_up_one():
            return None
        slot = self._empty.pop()
        span = Span(tuple(range(slot * self._slot, (slot + 1) * self._slot, self._run)), length)
        self._open.add(span)
        return span

    def room(self, span: Span) -> int:
        evictable = sum(self._span_pages(kept) for slot, kept in self._kept.items() if slot not in self._pinned)
        free = self._budget - self._open_pages - self._kept_pages + evictable
        if span.end * self._block_bytes % self._page_bytes:
            # A run that has let all go goes on in a page that is not counted.
            free -= sum(begin == span.end for begin in span.begin)
        last_page = -(-span.end * self._block_bytes // self._page_bytes) + free // len(span.starts)
        return max(0, min(span.length, last_page * self._page_bytes // self._block_bytes) - span.end)

    def grow(self, span: Span, num_blocks: int) -> None:
        before = self._span_pages(span)
        span.end += num_blocks
        assert span.end <= span.length
        self._open_pages += self._span_pages(span) - before
        while self._open_pages + self._kept_pages > self._budget:
            given_up = self._give_up_one()
            assert given_up, "room has been asked for"

    def trim(self, span: Span, group: int, begin: int) -> None:
        before = self._span_pages(span)
        self._cut(span, group, begin, span.end)
        self._open_pages += self._span_pages(span) - before

    def close(self, span: Span, first: int, last: int) -> None:
        self._open.remove(span)
        self._open_pages -= self._span_pages(span)
        slot = self._slot_of(span.starts[0])
        worth = first < last and self._max_kept > 0
        for group, begin in enumerate(span.begin):
            self._cut(span, group, min(max(begin, first), last) if worth else span.end, span.end)
        if not worth:
            self._empty.append(slot)
            return
        self._shorten(span, last)
        self._kept[slot] = span
        self._kept_pages += self._span_pages(span)
        if len(self._kept) > self._max_kept:
            self._give_up_one()

    def touch(self, block_id: int) -> None:
        slot = self._slot_of(block_id)
        if slot in self._kept:
            self._kept.move_to_end(slot)
            self._pinned.add(slot)

    def take_releases(self) -> list[tuple[int, int]]:
        self._pinned.clear()
        taken, self._releases = self._releases, []
        return taken

    def _slot_of(self, block_id: int) -> int:
        return block_id // self._slot

    def _pages(self, begin: int, end: int) -> int:
        """Pages that the blocks [begin, end) of a run touch."""
        if begin >= end:
            return 0
        return -(-end * self._block_bytes // self._page_bytes) - begin * self._block_bytes // self._page_bytes

    def _span_pages(self, span: Span) -> int:
        return sum(self._pages(begin, span.end) for begin in span.begin)

    def _cut(self, span: Span, group: int, begin: int, end: int) -> None:
        """The blocks of a run before `begin` are given back: the pages that nothing after them touches."""
        old = span.begin[group]
        if begin <= old:
            return
        page, size, base = self._page_bytes, self._block_bytes, span.starts[group] * self._block_bytes
        start = old * size // page * page
        stop = begin * size // page * page if begin < end else -(-end * size // page) * page
        self._release(base + start, base + stop)
        span.begin[group] = begin

    def _shorten(self, span: Span, end: int) -> None:
        """The blocks from `end` on are given back: the pages that nothing before them touches."""
        page, size = self._page_bytes, self._block_bytes
        for start, begin in zip(span.starts, span.begin, strict=True):
            first = -(-end * size // page) * page if begin < end else begin * size // page * page
            self._release(start * size + first, start * size + -(-span.end * size // page) * page)
        span.end = end
        span.begin = [min(begin, end) for begin in span.begin]

    def _release(self, start: int, stop: int) -> None:
        if start < stop:
            self._releases.append((start, stop))

    def _give_up_one(self) -> bool:
        """Evict the kept slot longest unused, pinned ones excepted."""
        slot = next((slot for slot in self._kept if slot not in self._pinned), None)
        if slot is None:
            return False
        span = self._kept.pop(slot)
        self._kept_pages -= self._span_pages(span)
        self._on_evict(span)
        for group in range(len(span.starts)):
            self._cut(span, group, span.end, span.end)
        self._empty.append(slot)
        return True

    def check_invariants(self) -> None:
        slots = [self._slot_of(span.starts[0]) for span in self._open]
        everything = [*slots, *self._kept, *self._empty]
        assert sorted(everything) == list(range(self.num_ids // self._slot)), "a slot is open, kept or empty"
        assert self._open_pages == sum(map(self._span_pages, self._open))
        assert self._kept_pages == sum(map(self._span_pages, self._kept.values()))
        assert self._open_pages + self._kept_pages <= self._budget
        assert len(self._kept) <= self._max_kept
        for span in [*self._open, *self._kept.values()]:
            assert span.end <= span.length
            assert all(0 <= begin <= span.end for begin in span.begin)
