"""The classical way: each request reserves one run of blocks for its longest possible length.

First fit, in a list of holes sorted by position; a hole that a span leaves merges with its neighbours (Knuth, The Art of Computer
Programming 1, section 2.5). So free blocks can be enough and no hole long enough, and what a request reserved but never reached is
lost to the others: the baseline that paging is measured against. Nothing is shared or kept. Invariants: holes are disjoint,
ascending and never adjacent; holes and spans together are all ids.
"""

from __future__ import annotations

from bisect import bisect_left

from kvist.kv.spans import Span


class ContiguousSpans:
    """Runs in `num_ids` block ids of `block_bytes`, `num_groups` of one length for each span."""

    def __init__(self, num_ids: int, num_groups: int, block_bytes: int) -> None:
        self.num_ids = num_ids
        self._num_groups = num_groups
        self._block_bytes = block_bytes
        self._starts = [0]
        self._lengths = [num_ids]
        self._spans: set[Span] = set()
        self._num_free = num_ids
        self._touched = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_kept(self) -> int:
        return 0

    @property
    def reserved_bytes(self) -> int:
        return (self.num_ids - self._num_free) * self._block_bytes

    @property
    def committed_bytes(self) -> int:
        return self._touched * self._block_bytes

    @property
    def held_bytes(self) -> int:
        return self.reserved_bytes

    @property
    def external_fragmentation(self) -> float:
        return 1.0 - max(self._lengths) / self._num_free if self._num_free else 0.0

    def can_open(self, length: int, num_blocks: int, keep: tuple[int, ...]) -> bool:
        """First fit finds a place for every run exactly if the holes hold that many runs side by side."""
        assert not keep, "nothing is kept here"
        return sum(hole // length for hole in self._lengths) >= self._num_groups

    def open(self, length: int) -> Span | None:
        if not self.can_open(length, length, ()):
            return None
        span = Span(tuple(self._take(length) for _ in range(self._num_groups)), length)
        self._spans.add(span)
        return span

    def room(self, span: Span) -> int:
        return span.length - span.end

    def grow(self, span: Span, num_blocks: int) -> None:
        assert num_blocks <= self.room(span)
        span.end += num_blocks
        self._touched = max(self._touched, *(start + span.end for start in span.starts))

    def trim(self, span: Span, group: int, begin: int) -> None:
        """A reservation stays whole: the blocks serve nobody else before the request ends."""

    def close(self, span: Span, first: int, last: int) -> None:
        self._spans.remove(span)
        for start in span.starts:
            self._give_back(start, span.length)

    def touch(self, block_id: int) -> None:
        raise AssertionError("nothing is found here")

    def take_releases(self) -> list[tuple[int, int]]:
        return []

    def _take(self, length: int) -> int:
        hole = next(i for i, size in enumerate(self._lengths) if size >= length)
        start = self._starts[hole]
        if self._lengths[hole] == length:
            del self._starts[hole], self._lengths[hole]
        else:
            self._starts[hole] += length
            self._lengths[hole] -= length
        self._num_free -= length
        return start

    def _give_back(self, start: int, length: int) -> None:
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._lengths.insert(at, length)
        if at + 1 < len(self._starts) and start + length == self._starts[at + 1]:
            self._lengths[at] += self._lengths.pop(at + 1)
            del self._starts[at + 1]
        if at and self._starts[at - 1] + self._lengths[at - 1] == start:
            self._lengths[at - 1] += self._lengths.pop(at)
            del self._starts[at]
        self._num_free += length

    def check_invariants(self) -> None:
        pieces = sorted(
            [(start, length, False) for start, length in zip(self._starts, self._lengths, strict=True)]
            + [(start, span.length, True) for span in self._spans for start in span.starts]
        )
        at, was_hole = 0, False
        for start, length, is_span in pieces:
            assert start == at, "every id is in one hole or one span"
            assert length > 0
            assert is_span or not was_hole, "holes that touch are one"
            at, was_hole = start + length, not is_span
        assert at == self.num_ids
        assert sum(self._lengths) == self._num_free
        assert all(0 <= span.end <= span.length for span in self._spans)
