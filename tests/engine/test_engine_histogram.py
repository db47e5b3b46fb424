"""Counts by size: bounds belong to the bucket below, nothing is lost beyond the last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.histogram import Histogram


def test_a_bound_is_inside_its_bucket_and_the_rest_is_beyond() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    frozen = histogram.snapshot()
    assert frozen.counts == (2, 2, 1)
    assert list(frozen.cumulative()) == [(1.0, 2), (2.0, 4), (float("inf"), 5)]
    assert (frozen.total, sum(frozen.counts)) == (7.5, 5)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_each_observation_is_in_one_bucket(values: list[tuple[float, int]]) -> None:
    bounds = (0.1, 1.0, 10.0, 50.0)
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    for bound, seen in histogram.snapshot().cumulative():
        assert seen == sum(times for value, times in values if value <= bound)
