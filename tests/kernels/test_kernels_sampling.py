"""Every native build draws and scores exactly as the NumPy twin, for any rows, parameters, company and number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.machines import NATIVE, make_ops, needs_native
from helpers.sampling import SampleBatch, batch_of, draw, mask_of, random_adjustment, random_row, random_rows, row_of, sample
from kvist.kernels.ops import F32, Ops
from kvist.kernels.sampling import Adjustment, Scores

pytestmark = needs_native
TWIN = make_ops("numpy")
VOCABULARIES = (1, 2, 15, 16, 17, 31, 33, 255, 257, 1000, 1024, 1025, 2049, 5003)


@pytest.fixture(params=[(isa, threads) for isa in NATIVE or ["none"] for threads in (1, 2)], ids=str)
def native(request: pytest.FixtureRequest) -> Ops:
    return make_ops(*request.param)


def random_case(seed: int, rows: int, vocabulary: int) -> tuple[F32, SampleBatch]:
    rng = np.random.default_rng(seed)
    changes = {row: random_adjustment(rng, vocabulary) for row in range(rows) if rng.random() < 0.4}
    changes[0] = Adjustment(mask=mask_of(np.zeros(vocabulary, np.bool_)))
    return random_rows(rng, rows, vocabulary), batch_of([random_row(rng) for _ in range(rows)], changes)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws_are_the_twins(native: Ops, vocabulary: int) -> None:
    logits, batch = random_case(vocabulary, 60, vocabulary)
    before = logits.copy()
    drawn, twin = sample(native, logits, batch), sample(TWIN, logits, batch)
    assert np.array_equal(logits, before, equal_nan=True)
    assert drawn.outcomes == twin.outcomes
    assert drawn.token_ids == twin.token_ids
    assert twin.outcomes[-1] == 1
    assert vocabulary < 30 or set(twin.outcomes) == {0, 1, 2}
    again = sample(native, logits, batch)
    assert again.token_ids == drawn.token_ids


def test_rows_that_are_bound_are_read_at_each_draw(native: Ops) -> None:
    """Their numbers, the logits' numbers and the logits themselves may change; what changed one draw does not change the next."""
    logits, batch = random_case(5, 30, 500)
    sampling = native.bind_sampling(batch.rows)
    for step in range(4):
        batch.rows["position"] += 1
        logits[:] = np.roll(logits, 1, axis=1)
        changes = batch.adjustments if step % 2 else {}
        expected = sample(TWIN, logits, SampleBatch(batch.rows, changes))
        assert native.sample(logits, sampling, changes) == expected
        assert native.sample(logits.copy(), sampling, changes) == expected
    with pytest.raises(ValueError, match="rows do not match"):
        native.sample(logits[1:], sampling, {})


@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("spread", [0.001, 1.0, 2.0, 5.0])
def test_a_nucleus_of_any_size_is_the_twins(native: Ops, top_p: float, spread: float) -> None:
    """From a few tokens to all of a vocabulary as large as real ones: each way in which the native search can end."""
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(6, 33001)) * spread).astype(np.float32)
    batch = batch_of([row_of(top_p=top_p, seed=seed) for seed in range(6)])
    assert sample(native, logits, batch).token_ids == sample(TWIN, logits, batch).token_ids


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 1, 3000])
def test_ties_are_the_twins(native: Ops, top_k: int, top_p: float) -> None:
    logits = np.zeros((8, 4099), np.float32)
    logits[4:, ::3] = 1.0
    batch = batch_of([row_of(top_k=top_k, top_p=top_p, seed=seed) for seed in range(8)])
    drawn = sample(native, logits, batch).token_ids
    assert drawn == sample(TWIN, logits, batch).token_ids
    assert top_k != 1 or set(drawn) == {0}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_scores_are_the_twins(native: Ops, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = random_rows(rng, 20, vocabulary)
    rows = rng.permutation(np.repeat(np.arange(20, dtype=np.int32), 2))
    token_ids = rng.integers(0, vocabulary, 40).astype(np.int32)
    tops = rng.integers(0, 21, 40).astype(np.int32)
    scores, twin = native.score(logits, rows, token_ids, tops), TWIN.score(logits, rows, token_ids, tops)
    for name in Scores._fields:
        assert np.array_equal(getattr(scores, name), getattr(twin, name)), name
    assert (twin.totals == 0).any()


def test_a_row_is_alone_in_any_company(native: Ops) -> None:
    logits, batch = random_case(11, 40, 777)
    together = sample(native, logits, batch)
    order = np.random.default_rng(1).permutation(40)
    changes = {place: batch.adjustments[row] for place, row in enumerate(order.tolist()) if row in batch.adjustments}
    shuffled = sample(native, logits[order], SampleBatch(batch.rows[order], changes))
    assert shuffled.token_ids == [together.token_ids[row] for row in order]
    for row in range(40):
        change = {0: batch.adjustments[row]} if row in batch.adjustments else {}
        alone = sample(native, logits[row : row + 1], SampleBatch(batch.rows[row : row + 1], change))
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.outcomes[0] == together.outcomes[row]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 1000])
def test_every_bit_of_a_mask_is_its_tokens(native: Ops, vocabulary: int) -> None:
    logits = np.ones(vocabulary, np.float32)
    for token in {0, 15 % vocabulary, 16 % vocabulary, 31 % vocabulary, 32 % vocabulary, vocabulary - 1}:
        change = Adjustment(mask=mask_of(np.arange(vocabulary) == token))
        for row in (row_of(temperature=0), row_of(), row_of(top_p=0.5), row_of(top_k=3)):
            assert draw(native, logits, row, change) == token


def test_no_rows_are_no_work(native: Ops) -> None:
    assert len(sample(native, np.zeros((0, 5), np.float32), batch_of([])).token_ids) == 0
    none = np.zeros(0, np.int32)
    assert len(native.score(np.zeros((0, 5), np.float32), none, none, none).totals) == 0


WORDS, IDS = np.zeros(1, np.uint32), np.array([33], np.int32)


@pytest.mark.parametrize(
    "change",
    [
        Adjustment(mask=WORDS),
        Adjustment(bias_ids=IDS, bias=np.zeros(1)),
        Adjustment(bias_ids=-IDS, bias=np.zeros(1)),
        Adjustment(bias_ids=IDS, bias=np.zeros(2)),
        Adjustment(seen=IDS, counts=IDS),
        Adjustment(seen=IDS),
    ],
)
def test_what_does_not_fit_the_vocabulary_is_refused(native: Ops, change: Adjustment) -> None:
    with pytest.raises(ValueError, match=r"adjust|sample"):
        sample(native, np.zeros((1, 33), np.float32), batch_of([row_of()], {0: change}))


@pytest.mark.parametrize(
    "change",
    [
        Adjustment(mask=np.ones(4, np.uint32)[::2]),
        Adjustment(mask=np.ones(2, np.int64)),  # type: ignore[arg-type]
        Adjustment(bias_ids=np.zeros(1, np.int64), bias=np.zeros(1)),  # type: ignore[arg-type]
        Adjustment(seen=np.zeros(1, np.int32), counts=np.zeros(1, np.int64)),  # type: ignore[arg-type]
    ],
)
def test_arrays_cross_as_they_are_or_not_at_all(native: Ops, change: Adjustment) -> None:
    """A converted copy would be gone before it is read."""
    with pytest.raises(TypeError):
        sample(native, np.zeros((1, 33), np.float32), batch_of([row_of()], {0: change}))


def test_scores_outside_the_logits_are_refused(native: Ops) -> None:
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    for rows, token_ids in ((one, zero), (zero, one * 9), (-one, zero)):
        with pytest.raises(ValueError, match="score"):
            native.score(np.zeros((1, 9), np.float32), rows, token_ids, one)
