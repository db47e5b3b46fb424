"""Sampling as requests ask for it, on every build there is: every parameter has an exact effect, all builds draw the same
token, and a draw depends on its row, seed, choice and position alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.machines import ISAS, make_ops
from kvist.engine import sampler
from kvist.engine.sampler import Failure, Sampler, SamplingState, TokenCounts
from kvist.errors import EngineError
from kvist.kernels.reference_sampling import random_share
from kvist.request import Request, SamplingParams, TokenLogprob


def state(params: SamplingParams, *, prompt=(0,), output=(), seed=0, choice=0, eos=frozenset(), vocab=8) -> SamplingState:
    request = Request("r#0", list(prompt), params, max_tokens=100, eos_token_ids=eos, seed=seed, choice=choice)
    request.output_token_ids = list(output)
    return SamplingState.of(request, vocab)


class Sampled(NamedTuple):
    """A row's draw, and what was noted of it."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def draw_all(one: Sampler, logits: np.ndarray, states: list[SamplingState]) -> list[Sampled]:
    token_ids, notes = one.sample(logits, states)
    assert notes.keys() <= set(range(len(token_ids)))
    drawn = []
    for row, token_id in enumerate(token_ids):
        note = notes.get(row)
        drawn.append(Sampled(0, error=note.reason) if isinstance(note, Failure) else Sampled(token_id, note))
    return drawn


def sample(rows, states: list[SamplingState]) -> list[Sampled]:
    """What all builds give alike."""
    logits = np.asarray(rows, np.float32)
    first, *others = [draw_all(Sampler(make_ops(isa)), logits, states) for isa in ISAS]
    for other in others:
        assert other == first
    return first


def score(row, token: int, num_top: int) -> TokenLogprob:
    logits = np.asarray(row, np.float32)[None]
    first, *others = [sampler.score(make_ops(isa), logits, [0], [token], [num_top]) for isa in ISAS]
    for other in others:
        assert other == first
    return first[0]


def draw_row(row, one: SamplingState) -> int:
    (drawn,) = sample(np.asarray(row)[None], [one])
    assert drawn.error is None
    return drawn.token_id


def draw(logits, params: SamplingParams, **keywords) -> int:
    return draw_row(logits, state(params, vocab=len(logits), **keywords))


def draws(row, params: SamplingParams, number: int) -> list[int]:
    """One for each seed."""
    rows = np.broadcast_to(np.asarray(row, np.float32), (number, len(row)))
    return [
        one.token_id
        for one in sample(np.ascontiguousarray(rows), [state(params, seed=seed, vocab=len(row)) for seed in range(number)])
    ]


def support(logits, params: SamplingParams, number: int = 300) -> set[int]:
    return set(draws(logits, params, number))


GREEDY = SamplingParams(temperature=0)


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie():
    assert draw([0, 3, 1, 3], GREEDY) == 1
    assert [one.token_id for one in sample(np.float32([[0, 3, 1, 3], [5, 0, 5, 0]]), [state(GREEDY), state(GREEDY)])] == [1, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-4])
def test_tiny_temperatures_mean_greedy(temperature):
    params = SamplingParams(temperature=temperature)
    assert support([0, 2.9, 1, 3], params, number=50) == {3}


def test_tiny_top_p_means_greedy():
    assert support([0, 2, 1, 3], SamplingParams(top_p=0.0001), number=50) == {3}


def test_temperature_one_follows_the_distribution():
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    counts = np.bincount(draws(np.log(probabilities), SamplingParams(), 4000), minlength=4)
    assert np.abs(counts / 4000 - probabilities).max() < 0.02


def test_temperature_sharpens():
    assert abs(np.mean(draws(np.log([0.2, 0.8]), SamplingParams(temperature=0.5), 2000)) - 0.64 / 0.68) < 0.02


def test_inverse_cdf_in_order_of_ids():
    """The drawn token is the first whose cumulative probability passes the random number."""
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    for seed in range(100):
        share = random_share(seed, 3, 5) * 2.0**-53
        expected = int(np.searchsorted(np.cumsum(probabilities), share, side="right"))
        assert draw(np.log(probabilities), SamplingParams(), seed=seed, choice=3, output=[0] * 5) == expected


def test_top_k_keeps_exactly_k_ties_by_id():
    assert support([1, 3, 3, 3, 0], SamplingParams(top_k=2)) == {1, 2}
    assert support([1, 3, 3, 3, 0], SamplingParams(top_k=4)) == {0, 1, 2, 3}
    assert support([1, 3, 3, 3, 0], SamplingParams(top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_it():
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert support(row, SamplingParams(top_p=0.49)) == {0}
    assert support(row, SamplingParams(top_p=0.6)) == {0, 1}
    assert support(row, SamplingParams(top_p=0.81)) == {0, 1, 2}


def test_top_p_counts_what_top_k_left():
    """Of [0.5, 0.3] the first has 0.625 of the weight."""
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert support(row, SamplingParams(top_k=2, top_p=0.6)) == {0}
    assert support(row, SamplingParams(top_k=2, top_p=0.7)) == {0, 1}


def test_top_p_of_a_flat_vocabulary():
    drawn = draws(np.zeros(3000), SamplingParams(top_p=0.5), 300)
    assert max(drawn) < 1500
    assert max(drawn) > 1400


def test_min_p_is_relative_to_the_likeliest():
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert support(row, SamplingParams(min_p=0.5)) == {0, 1}
    assert support(row, SamplingParams(min_p=0.25)) == {0, 1, 2}


def test_repetition_penalty_over_prompt_and_output():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert draw([4, 3, 1, 0], params, prompt=[0]) == 1
    assert draw([4, 3, 2.1, 0], params, prompt=[0], output=[1]) == 2
    assert draw([-1, -1.5, -9, -9], params, prompt=[0]) == 1, "a negative logit is multiplied"


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 100.0])
def test_penalties_beyond_float32_still_draw_a_token(penalty):
    """What was seen and is likely grows without bound; what was seen and is unlikely shrinks."""
    logits = np.array([3.0, -2.0, 1.0, 0.5], np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
        drawn = draw(logits, params, prompt=(0, 1), output=(1,))
        assert drawn == 0 if penalty < 1 else drawn in (0, 2, 3)


def test_presence_and_frequency_penalties_over_the_output_only():
    assert draw([4, 3.5, 0, 0], SamplingParams(temperature=0, presence_penalty=1.0), prompt=[0, 0]) == 0
    assert draw([4, 3.5, 0, 0], SamplingParams(temperature=0, presence_penalty=1.0), output=[0, 0, 0]) == 1
    assert draw([4, 2.5, 0, 0], SamplingParams(temperature=0, presence_penalty=1.0), output=[0, 0, 0]) == 0, "once, however often"
    assert draw([4, 2.5, 0, 0], SamplingParams(temperature=0, frequency_penalty=1.0), output=[0]) == 0
    assert draw([4, 2.5, 0, 0], SamplingParams(temperature=0, frequency_penalty=1.0), output=[0, 0]) == 1


def test_penalties_follow_the_growing_output():
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    one = state(params)
    drawn = []
    for _ in range(4):
        drawn.append(draw_row([2, 1.5, 0, -9], one))
        one.request.output_token_ids.append(drawn[-1])
    assert drawn == [0, 1, 0, 1]


def test_logit_bias():
    assert draw([4, 3, 0, 0], SamplingParams(temperature=0, logit_bias={2: 10.0})) == 2
    assert draw([4, 3, 0, 0], SamplingParams(temperature=0, logit_bias={0: -100})) == 1


def test_min_tokens_masks_eos_and_stop_ids_until_then():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    for output, expected in (([], 2), ([5], 2), ([5, 5], 0)):
        assert draw([9, 8, 7, 0], params, eos=frozenset({0}), output=output) == expected
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert draw([9, 8, 7, 0], ignoring, eos=frozenset({0})) == 0


def test_end_ids_beyond_the_models_vocabulary_are_harmless():
    assert draw([0.0, 5.0, 1.0], SamplingParams(temperature=0, min_tokens=1), eos=frozenset({1, 99})) == 2


def mask_of(allowed, vocab: int) -> np.ndarray:
    """uint32 words in which the bits of `allowed` are set."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize("vocab", [4, 31, 32, 33, 70])
def test_a_mask_leaves_only_what_it_allows(vocab):
    row = np.linspace(5, 0, vocab).astype(np.float32)
    one = state(GREEDY, vocab=vocab)
    assert one.adjustment() is None
    for allowed in ({1, 3}, {vocab - 1}, {2, vocab - 1}):
        one.mask = mask_of(allowed, vocab)
        assert sample(row[None], [one])[0].token_id == min(allowed)
    for params in (SamplingParams(temperature=5), SamplingParams(top_p=0.99), SamplingParams(logit_bias={0: 100.0}, top_k=3)):
        drawn = set()
        for seed in range(100):
            one = state(params, vocab=vocab, seed=seed)
            one.mask = mask_of({1, 3}, vocab)
            drawn.add(sample(row[None], [one])[0].token_id)
        assert drawn == {1, 3}


def test_a_mask_without_a_token_fails_its_row_alone():
    states = [state(SamplingParams(temperature=t)) for t in (0, 0, 1)]
    states[1].mask = states[2].mask = mask_of((), 4)
    drawn = sample(np.float32([[0, 1, 2, 3]] * 3), states)
    assert [one.error is None for one in drawn] == [True, False, False]
    assert drawn[0].token_id == 3
    assert "allows none" in drawn[1].error
    states[1].mask = mask_of({0, 2}, 4)
    assert sample(np.float32([[-np.inf, 1, np.nan, 3]]), states[1:2])[0].error is not None, "what it allows has no number"


def test_logprobs_are_of_the_distribution_before_the_mask():
    one = state(SamplingParams(temperature=0, logprobs=2), vocab=3)
    one.mask = mask_of({0}, 3)
    (drawn,) = sample(np.log(np.float32([[0.2, 0.5, 0.3]])), [one])
    assert (drawn.token_id, drawn.logprob.rank) == (0, 3)
    assert [token for token, _ in drawn.logprob.top] == [1, 2]


def test_nan_is_never_drawn():
    assert draw([math.nan, 1, 2, math.nan], GREEDY) == 2
    assert support([math.nan, 1, 1, -math.inf], SamplingParams(), number=50) == {1, 2}
    assert draw([math.inf, 1, 2, 3], SamplingParams()) == 0


def test_a_row_without_a_number_fails_alone():
    rows = np.float32([[0, 1, 2, 3], [math.nan] * 4, [-math.inf] * 4, [3, 2, 1, 0]])
    for params in (GREEDY, SamplingParams(top_k=1)):
        drawn = sample(rows, [state(params) for _ in range(4)])
        assert [one.token_id for one in drawn if one.error is None] == [3, 0]
        assert [one.error is None for one in drawn] == [True, False, False, True]


def test_seeds_are_taken_modulo_two_to_the_64():
    row = np.zeros(1000)
    assert draw(row, SamplingParams(), seed=-1) == draw(row, SamplingParams(), seed=2**64 - 1)
    assert (
        len(
            {
                draw(row, SamplingParams(), seed=seed, choice=choice, output=[0] * position)
                for seed in (0, 2**63)
                for choice in (0, 1)
                for position in (0, 1)
            }
        )
        == 8
    )


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_rows_do_not_depend_on_the_batch(seed, size):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size, 50)).astype(np.float32)
    kinds = [
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, logprobs=2),
        SamplingParams(min_p=0.1),
    ]
    params = [kinds[i] for i in rng.integers(0, len(kinds), size)]
    together = sample(rows, [state(p, seed=i, vocab=50) for i, p in enumerate(params)])
    alone = [sample(rows[i : i + 1], [state(p, seed=i, vocab=50)])[0] for i, p in enumerate(params)]
    assert together == alone


KINDS = (
    GREEDY,
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(frequency_penalty=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0, min_tokens=3),
    SamplingParams(top_k=5, logit_bias={3: 4.0}),
)


@given(st.integers(0, 2**32), st.lists(st.sets(st.integers(0, len(KINDS) - 1), min_size=1), min_size=1, max_size=6))
def test_what_is_kept_from_step_to_step_changes_no_draw(seed, companies):
    """Rows come and go, outputs grow, a row fails; a sampler that has never seen them draws the same."""
    rng = np.random.default_rng(seed)
    states = [state(params, seed=i, vocab=50, eos=frozenset({1})) for i, params in enumerate(KINDS)]
    kept = {isa: Sampler(make_ops(isa)) for isa in ISAS}
    for company in companies:
        logits = rng.normal(size=(len(company), 50)).astype(np.float32)
        logits[rng.random(len(company)) < 0.2] = math.nan
        for _ in range(int(rng.integers(1, 4))):
            together = [states[i] for i in sorted(company)]
            drawn = sample(logits, together)
            assert all(draw_all(one, logits, together) == drawn for one in kept.values())
            for one, token in zip(together, drawn, strict=True):
                if token.error is None:
                    one.request.output_token_ids.append(token.token_id)
            logits = np.roll(logits, 1, axis=1)


def test_logprobs_are_of_the_raw_distribution():
    probabilities = np.array([0.1, 0.4, 0.2, 0.3])
    params = SamplingParams(temperature=0, logit_bias={0: 50.0}, logprobs=2)
    (drawn,) = sample(np.log(probabilities)[None].astype(np.float32), [state(params, vocab=4)])
    assert drawn.token_id == 0
    assert drawn.logprob is not None
    assert (drawn.logprob.token_id, drawn.logprob.rank) == (0, 4)
    assert drawn.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in drawn.logprob.top] == [1, 3]
    assert [value for _, value in drawn.logprob.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_ranks_of_ties_go_by_id():
    row = np.float32([1, 2, 2, 0])
    assert [score(row, token, 0).rank for token in range(4)] == [3, 1, 2, 4]
    assert score(row, 2, 0).top == ()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 45))
def test_the_likeliest_are_those_of_a_stable_sort(values, count):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert [token for token, _ in score(values, 0, count).top] == expected


def test_a_row_without_a_number_has_no_score():
    with pytest.raises(EngineError, match="no finite number"):
        score([math.nan, -math.inf], 0, 1)


@given(st.lists(st.integers(0, 30), max_size=60), st.lists(st.integers(0, 30), max_size=80), st.integers(1, 7))
def test_counts_grow_with_the_output(prompt, output, step):
    counts = TokenCounts.of(prompt)
    younger = counts.begin_again()
    for end in [*range(0, len(output), step), len(output)]:
        ids, times = counts.advance(output[:end])
        assert sorted(ids.tolist()) == sorted({*prompt, *output[:end]})
        assert {token: n for token, n in zip(ids.tolist(), times.tolist(), strict=True) if n} == Counter(output[:end])
    ids, times = younger.advance(output[::-1])
    assert {token: n for token, n in zip(ids.tolist(), times.tolist(), strict=True) if n} == Counter(output)


def test_choices_share_the_arrays_of_their_biases_and_not_their_counts():
    params = SamplingParams(temperature=0, logit_bias={2: 3.0, 5: -1.0}, frequency_penalty=1.0, min_tokens=1, stop_token_ids=(4,))
    first = state(params, prompt=(1, 2))
    second = SamplingState.of(first.request, 8, first.biases, first)
    one, other = first.adjustment(), second.adjustment()
    assert one is not None
    assert other is not None
    assert one.bias is other.bias
    assert dict(zip(one.bias_ids.tolist(), one.bias.tolist(), strict=True)) == {2: 3.0, 5: -1.0, 4: -math.inf}
    assert one.counts is not other.counts
    first.request.output_token_ids.append(3)
    later = first.adjustment()
    assert later is not None
    assert later.bias_ids.tolist() == [2, 5], "no longer before min_tokens"
    assert second.counts.advance([])[0].tolist() == [1, 2]


def test_a_state_that_cannot_be_lowered_fails_alone(monkeypatch):
    states = [state(GREEDY) for _ in range(3)]
    monkeypatch.setattr(states[1], "counts", object())
    drawn = sample(np.float32([[0, 1, 2, 3]] * 3), states)
    assert [one.error is None for one in drawn] == [True, False, True]
    assert [drawn[0].token_id, drawn[2].token_id] == [3, 3]
