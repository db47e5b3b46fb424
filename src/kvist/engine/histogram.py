"""Counts by size, for metrics: cheap to observe (a token costs one search of a short list), frozen to be read elsewhere.

Knows no metrics library and no names. Invariants: `sum(counts)` is the number of observations; `counts[i]` are those in
(bounds[i - 1], bounds[i]], the last of them those beyond every bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class HistogramSnapshot(NamedTuple):
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """The sum of all values."""

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, observations up to it), as Prometheus has them, infinity last."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            yield bound, seen


class Histogram:
    """One thread observes; `snapshot` may be called there too."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(bounds)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
