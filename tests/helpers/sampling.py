"""Rows of logits and of parameters for tests of sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, Ops
from kvist.kernels.sampling import ROW, SHARE_BITS, U32, Adjustment


@dataclass(frozen=True)
class SampleBatch:
    """Rows of dtype ROW, and what changes the logits of some."""

    rows: npt.NDArray[Any]
    adjustments: Mapping[int, Adjustment] = field(default_factory=dict)


def row_of(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
) -> Any:
    """One record of dtype ROW, as the engine makes it."""
    if temperature == 0:
        return np.zeros((), ROW)
    min_p_log = math.log(min_p) if min_p > 0 else -math.inf
    return np.array((seed, choice, position, int(top_p * 2**SHARE_BITS), 1 / temperature, min_p_log, top_k, 0), ROW)


def batch_of(rows: list[Any], adjustments: Mapping[int, Adjustment] | None = None) -> SampleBatch:
    return SampleBatch(np.array(rows, ROW), dict(adjustments or {}))


class Draws(NamedTuple):
    token_ids: list[int]
    outcomes: list[int]


def sample(ops: Ops, logits: F32, batch: SampleBatch) -> Draws:
    return Draws(*ops.sample(logits, ops.bind_sampling(batch.rows), batch.adjustments))


def draw(ops: Ops, logits: Any, row: Any, change: Adjustment | None = None) -> int:
    """One token of one row, of which some must be left."""
    batch = batch_of([row], {} if change is None else {0: change})
    drawn = sample(ops, np.asarray(logits, np.float32)[None], batch)
    assert drawn.outcomes == [0]
    return drawn.token_ids[0]


def mask_of(allowed: Any) -> U32:
    """Words in which bit t is allowed[t]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def random_rows(rng: np.random.Generator, rows: int, vocabulary: int) -> F32:
    """Sharp and flat, with ties, and a few with what is not a number; the last row has no number at all."""
    logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * rng.choice([0.01, 1, 4, 12], (rows, 1)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    for value in (np.nan, -np.inf, np.inf, 1e-41, -0.0):
        spoiled = rng.random(rows) < 0.15
        logits[spoiled] = np.where(rng.random((int(spoiled.sum()), vocabulary)) < 0.2, np.float32(value), logits[spoiled])
    logits[-1] = rng.choice([np.nan, -np.inf], vocabulary)
    return logits


def random_row(rng: np.random.Generator) -> Any:
    if rng.random() < 0.15:
        return row_of(temperature=0)
    return row_of(
        temperature=float(rng.choice([1.0, 0.3, 0.7, 1.7, 30.0, 1e-4])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 700, 2000])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.999999, 0.01])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.9, 1.0, 1e-30])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        choice=int(rng.integers(0, 128)),
        position=int(rng.integers(0, 10000)),
    )


def random_adjustment(rng: np.random.Generator, vocabulary: int) -> Adjustment:
    mask = (
        mask_of(rng.random(vocabulary) < rng.choice([0.0, 0.02, 0.5, 0.999], p=[0.05, 0.25, 0.3, 0.4]))
        if rng.random() < 0.6
        else None
    )
    ids = rng.permutation(vocabulary).astype(np.int32)
    biased, seen = int(rng.integers(0, min(vocabulary, 20) + 1)), int(rng.integers(0, vocabulary + 1))
    bias = rng.choice([-np.inf, 5.0, -100.0, 0.123, 1e-310], biased)
    return Adjustment(
        mask,
        ids[:biased] if biased else None,
        bias if biased else None,
        np.roll(ids, 7)[:seen] if seen else None,
        rng.integers(0, 5, seen).astype(np.int32) if seen else None,
        float(rng.choice([1.0, 1.2, 0.7, 1e-300, 100.0])),
        float(rng.choice([0.0, 0.5, -2.0])),
        float(rng.choice([0.0, 0.5, -2.0])),
    )
