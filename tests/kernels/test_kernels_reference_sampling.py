"""The sampling twin against plain Python: weights near e^x, an oracle that sorts and loops, published words, and frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.machines import ISAS, make_ops
from helpers.sampling import batch_of, draw, mask_of, row_of, sample
from kvist.kernels.reference_sampling import adjusted, numbers, random_share, scale, weigh
from kvist.kernels.sampling import Adjustment

f32 = np.float32
TWIN = make_ops("numpy")
FASTEST = make_ops(ISAS[1] if len(ISAS) > 1 else "numpy")


def test_weights_are_exponentials() -> None:
    x = -np.concatenate([np.linspace(0, 30, 20001), 10.0 ** np.arange(-40, 2)]).astype(f32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(weigh(x) * 2.0**-40 - exact).max() < 2e-7
    assert (np.abs(weigh(x) * 2.0**-40 - exact) <= 2e-7 * exact + 2.0**-40).all()
    assert weigh(np.array([0.0, -np.inf, -1e30], f32)).tolist() == [2**40, 0, 0]


def test_random_shares_are_philox_as_published() -> None:
    """The generator is part of a seed's meaning. The word is the known answer of Random123 for counter 0 and key 0."""
    assert random_share(0, 0, 0) == 0x16554D9ECA36314C >> 11
    assert [random_share(1, 0, 0) * 2.0**-53, random_share(1, 2, 3) * 2.0**-53] == [0.794901327418393, 0.6378219684004002]
    keys = [(seed, choice, position) for seed in (0, 1, 2**64 - 1) for choice in (0, 1) for position in (0, 1)]
    assert len({random_share(*key) for key in keys}) == 12


def oracle(logits: list[float], row: Any) -> list[tuple[int, int]]:
    """Ids that may be drawn, ascending, with their weights."""
    scaled = scale(np.array(logits, f32), row["inverse_temperature"])
    weights = weigh(scaled).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = [i for i in order if scaled[i] >= row["min_p_log"]]
    if row["top_k"] > 0:
        kept = kept[: int(row["top_k"])]
    total, reached, nucleus = sum(weights[i] for i in kept), 0, []
    for i in kept:
        nucleus.append(i)
        reached += weights[i]
        if reached * 2**53 >= int(row["top_p"]) * total:
            break
    return [(i, weights[i]) for i in sorted(nucleus)]


def oracle_draw(logits: list[float], row: Any) -> int:
    kept = oracle(logits, row)
    rest = random_share(int(row["seed"]), int(row["choice"]), int(row["position"])) * sum(w for _, w in kept) // 2**53
    for token, weight in kept:
        if rest < weight:
            return token
        rest -= weight
    raise AssertionError


VALUES = st.one_of(st.integers(-4, 4).map(float), st.floats(-20, 20, width=32), st.just(-math.inf))


@given(
    st.lists(VALUES, min_size=1, max_size=80).filter(lambda values: max(values) > -math.inf),
    st.floats(0.01, 100),
    st.integers(0, 90),
    st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
)
def test_draws_are_those_of_sorting_and_looping(logits, temperature, top_k, top_p, min_p, seed, position) -> None:
    row = row_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, choice=position % 3, position=position)
    clean = numbers(np.array(logits, f32)).tolist()
    expected = oracle_draw(clean, row)
    for isa in ISAS:
        assert draw(make_ops(isa), logits, row) == expected, isa


PARAMETERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_frequencies_are_the_probabilities(parameters: dict[str, Any]) -> None:
    """Pearson's statistic of 20,000 draws is within six standard deviations of its mean."""
    number = 20_000
    logits = np.random.default_rng(8).normal(size=60).astype(f32) * 2
    kept = oracle(logits.tolist(), row_of(**parameters))
    expected = np.zeros(60)
    expected[[token for token, _ in kept]] = [weight for _, weight in kept]
    expected *= number / expected.sum()
    batch = batch_of([row_of(seed=1234, position=position, **parameters) for position in range(number)])
    counts = np.bincount(sample(FASTEST, np.tile(logits, (number, 1)), batch).token_ids, minlength=60)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 10)
    bins = [(counts[i], expected[i]) for i in np.flatnonzero(expected >= 10)]
    bins += [(counts[rare].sum(), expected[rare].sum())] if rare.any() else []
    statistic, freedom = sum((seen - mean) ** 2 / mean for seen, mean in bins), len(bins) - 1
    assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


def test_adjustments_in_plain_words() -> None:
    row = np.array([4.0, -3.0, 2.0, 1.0, math.nan], f32)
    ids, two = np.array([0, 1], np.int32), np.array([0, 2], np.int32)
    assert adjusted(row, Adjustment(bias_ids=ids, bias=np.array([1.5, -math.inf]))).tolist() == [5.5, -math.inf, 2, 1, -math.inf]
    assert adjusted(row, Adjustment(seen=ids, counts=two, repetition=2.0)).tolist() == [2, -6, 2, 1, -math.inf]
    change = Adjustment(seen=ids, counts=two, frequency=0.5, presence=0.25)
    assert adjusted(row, change).tolist() == [4, -4.25, 2, 1, -math.inf], "of what the output holds"
    assert adjusted(row, Adjustment(mask=mask_of([0, 1, 0, 1, 1]))).tolist() == [-math.inf, -3, -math.inf, 1, -math.inf]


def test_penalties_beyond_float32_stay_numbers() -> None:
    row = np.array([3.0, -2.0, 0.0], f32)
    ids, counts = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    changed = adjusted(row, Adjustment(seen=ids, counts=counts, repetition=1e-300))
    assert changed.tolist() == [float(np.finfo(f32).max), 0, 0]


def test_minus_zero_ties_with_zero() -> None:
    for isa in ISAS:
        assert draw(make_ops(isa), [-0.0, 0.0], row_of(temperature=0)) == 0
        assert draw(make_ops(isa), [1e-41, 0.0], row_of(top_k=1)) == 0
        assert draw(make_ops(isa), [-1e-41, 0.0], row_of(top_k=1)) == 0
