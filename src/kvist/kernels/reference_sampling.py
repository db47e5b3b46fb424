"""The NumPy twin of sampling: the definition of `Ops.sample` and `Ops.score`, by plain sorting.

A row's logits count as numbers first: NaN as -inf, +inf as the largest float, subnormals and -0 as 0. Then, each step rounded to
float32: bias; penalties; mask. What is left is ordered by logit, largest first, ties by id, and

* scaled = (logit - largest) * inverse temperature; weight = e^scaled in whole units of 2^-40, at most 2^40;
* min-p keeps those whose scaled logit is at least `min_p_log`, top-k the first k of them, top-p the fewest of the first of these
  whose weights reach its share of their sum (rounded up, at least one unit);
* the token is the first, by id, with which the weights of those kept exceed the random share of their sum (rounded down).

Weights are integers and the exponential is fixed products and sums, each rounded; so every build of every instruction set draws the
same token from the same logits, and nothing depends on an order of summation or on the other rows. A token that is 2^41 times less
likely than the likeliest weighs nothing and is never drawn.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x64-10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, I32, I64
from kvist.kernels.sampling import (
    DRAWN,
    F64,
    NO_NUMBER,
    NONE_LEFT,
    SHARE_BITS,
    U64,
    WEIGHT_BITS,
    Adjustment,
    Drawn,
    Scores,
)

f32 = np.float32
LARGEST = np.finfo(f32).max
SMALLEST = np.finfo(f32).tiny
FAINTEST = f32(-30.0)
"""Below this a weight is nothing."""
POLYNOMIAL = tuple(
    (f32(first), f32(second))
    for first, second in (
        (1.9875691500e-4, 1.3981999507e-3),
        (8.3334519073e-3, 4.1665795894e-2),
        (1.6666665459e-1, 5.0000001201e-1),
        (1.0, 1.0),
    )
)


def flushed(values: F32) -> F32:
    """Subnormals and -0 as 0."""
    return np.where(np.abs(values) < SMALLEST, f32(0), values)


def numbers(row: F32) -> F32:
    return flushed(np.minimum(np.where(np.isnan(row), f32(-np.inf), row), LARGEST))


@np.errstate(over="ignore")
def scale(logits: F32, inverse_temperature: np.float32) -> F32:
    """Relative to the largest, which is finite."""
    return flushed(flushed(logits - logits.max()) * inverse_temperature)


@np.errstate(under="ignore")
def weigh(scaled: F32) -> U64:
    """e^scaled for scaled <= 0 in units of 2^-40, exactly 2^40 at 0. Range reduction by log2(e) with a two-part ln 2."""
    x = np.maximum(scaled, FAINTEST)
    n: F32 = np.rint(x * f32(1.44269504))
    r = x + n * f32(-0.693359375)
    r = r + n * f32(2.12194440e-4)
    square, p = r * r, np.zeros_like(r)
    for first, second in POLYNOMIAL:
        p = p * square + (first * r + second)
    weights: U64 = np.rint(np.ldexp(p.astype(np.float64), n.astype(np.int32) + WEIGHT_BITS)).astype(np.uint64)
    return weights


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def adjusted(row: F32, change: Adjustment) -> F32:
    """The row's numbers after bias, penalties and mask. Repetition (Keskar et al., CTRL, section 4.1) divides what is positive and
    multiplies the rest, over all that was seen; frequency and presence are taken from what the output holds."""
    logits = numbers(row)
    if change.bias_ids is not None:
        assert change.bias is not None
        logits[change.bias_ids] = numbers((logits[change.bias_ids] + change.bias).astype(f32))
    if change.seen is not None:
        assert change.counts is not None
        before: F64 = logits[change.seen].astype(np.float64)
        values: F64 = np.where(before > 0, before / change.repetition, before * change.repetition)
        values -= np.where(change.counts > 0, change.frequency * change.counts + change.presence, 0.0)
        logits[change.seen] = numbers(values.astype(f32))
    if change.mask is not None:
        assert len(change.mask) == -(-len(logits) // 32)
        allowed = np.unpackbits(change.mask.astype("<u4").view(np.uint8), bitorder="little")[: len(logits)]
        logits = np.where(allowed == 0, f32(-np.inf), logits)
    return logits


def in_order(logits: F32) -> I64:
    """Ids by logit, largest first, ties by id."""
    return np.argsort(-logits, kind="stable")


def random_share(seed: int, choice: int, position: int) -> int:
    """The high 53 bits of the first word of Philox 4x64-10 with key (seed, choice) and counter `position`. NumPy's generator adds
    one to its counter before its first block."""
    generator = np.random.Philox(key=np.array([seed, choice], np.uint64), counter=(position - 1) % 2**256)
    return int(generator.random_raw()) >> 64 - SHARE_BITS


def first_reaching(weights: U64, goal: int) -> int:
    """The first place up to which the weights add up to `goal` or more; there is one."""
    return int(np.searchsorted(np.cumsum(weights), np.uint64(goal), side="left"))


def draw(logits: F32, row: Any) -> int:
    """One token; the largest of `logits` is finite."""
    if row["inverse_temperature"] == 0:
        return int(logits.argmax())
    scaled = scale(logits, row["inverse_temperature"])
    weights = weigh(scaled)
    kept = in_order(logits)
    if row["min_p_log"] > -np.inf:
        kept = kept[scaled[kept] >= row["min_p_log"]]
    if row["top_k"] > 0:
        kept = kept[: row["top_k"]]
    total, share = int(weights[kept].sum()), int(row["top_p"])
    if share < 1 << SHARE_BITS:
        goal = max(-(-share * total >> SHARE_BITS), 1)
        kept = kept[: first_reaching(weights[kept], goal) + 1]
    kept = np.sort(kept)
    total = int(weights[kept].sum())
    target = random_share(int(row["seed"]), int(row["choice"]), int(row["position"])) * total >> SHARE_BITS
    return int(kept[first_reaching(weights[kept], target + 1)])


def sample(logits: F32, rows: npt.NDArray[Any], adjustments: Mapping[int, Adjustment]) -> Drawn:
    token_ids, outcomes = [], []
    for i, row in enumerate(rows):
        token_id, outcome = 0, NO_NUMBER
        ready = numbers(logits[i])
        if ready.max() > -np.inf:
            if i in adjustments:
                ready = adjusted(logits[i], adjustments[i])
            outcome = NONE_LEFT if ready.max() == -np.inf else DRAWN
        if outcome == DRAWN:
            token_id = draw(ready, row)
        token_ids.append(token_id)
        outcomes.append(outcome)
    return token_ids, outcomes


def score(logits: F32, rows: I32, token_ids: I32, tops: I32) -> Scores:
    scores = Scores.empty(tops)
    for s, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
        ready = numbers(logits[row])
        if ready.max() == -np.inf:
            continue
        value: npt.NDArray[Any] = ready[token]
        scores.logits[s], scores.peaks[s] = value, ready.max()
        scores.totals[s] = weigh(scale(ready, f32(1))).sum()
        scores.ranks[s] = 1 + np.count_nonzero(ready > value) + np.count_nonzero(ready[:token] == value)
        top = in_order(ready)[: tops[s]]
        scores.top_ids[s, : len(top)], scores.top_logits[s, : len(top)] = top, ready[top]
    return scores
