"""What requests ask of a draw, lowered for the kernels: one call for all tokens of a step, one for the log probabilities asked for.

The order of the steps is vLLM's: logit bias, minimum length, penalties, mask, temperature, min-p, top-k, top-p. What they mean is
defined in `kernels/reference_sampling.py`; a draw depends on its row, its parameters and (seed, choice, position) alone, and ties
go to the lowest id. Log probabilities are those of the model's own distribution, before all of it. This module loops over requests
and over tokens that are new, biased or ruled out, never over a vocabulary. It knows no text, no blocks and no scheduler.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import EngineError
from kvist.kernels.ops import F32, I32, Ops
from kvist.kernels.sampling import (
    DRAWN,
    F64,
    NO_NUMBER,
    NONE_LEFT,
    POSITION_WORD,
    ROW,
    SHARE_BITS,
    WEIGHT_BITS,
    WORDS_A_ROW,
    Adjustment,
)
from kvist.request import Request, SamplingParams, TokenLogprob

REASONS = {
    NO_NUMBER: "The model's logits hold no finite number for this request.",
    NONE_LEFT: "No token is left for this request: what its output is bound to allows none that can be drawn.",
}


class TokenCounts:
    """The distinct tokens that the penalties see, and how often each stands in the output; kept up to date as the output grows."""

    def __init__(self, places: dict[int, int], ids: I32) -> None:
        self._places, self._ids = places, ids
        self._counts = np.zeros(len(ids), np.int32)
        self._num_counted = 0

    @classmethod
    def of(cls, prompt_token_ids: Sequence[int]) -> TokenCounts:
        ids = np.unique(np.asarray(prompt_token_ids, np.int32))
        return cls({token_id: place for place, token_id in enumerate(ids.tolist())}, ids)

    def begin_again(self) -> TokenCounts:
        """For another choice of the same prompt, before anything is counted."""
        assert not self._num_counted
        return TokenCounts(self._places.copy(), self._ids.copy())

    def advance(self, output_token_ids: Sequence[int]) -> tuple[I32, I32]:
        """Ids and counts, the output taken in."""
        for token_id in output_token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place + 16, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.int32)])
            self._ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(output_token_ids)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class Biases:
    """What `params` add to logits, as the kernels take it: made at the first draw, once for all choices that share them."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._made: dict[tuple[int, ...], tuple[I32, F64]] = {}
        """By the ids that are ruled out besides: before `min_tokens` and after."""

    def beside(self, ruled_out: tuple[int, ...]) -> tuple[I32, F64] | tuple[None, None]:
        """Ids and values; the ids in `ruled_out` are impossible."""
        if not self.params.logit_bias and not ruled_out:
            return None, None
        if ruled_out not in self._made:
            values = {**self.params.logit_bias, **dict.fromkeys(ruled_out, -math.inf)}
            self._made[ruled_out] = np.array(list(values), np.int32), np.array(list(values.values()), np.float64)
        return self._made[ruled_out]


@dataclass(eq=False)
class SamplingState:
    """One choice's side of sampling. The next token's position in the output is the length of the output so far."""

    request: Request
    masked_until_min_tokens: tuple[int, ...]
    """EOS and stop ids: impossible while the output is shorter than `min_tokens`."""
    biases: Biases
    counts: TokenCounts | None = None
    mask: npt.NDArray[np.uint32] | None = None
    """Which tokens may come next: bit `token % 32` of word `token // 32`, [ceil(vocabulary / 32)]; None for all. Looked up at each
    draw, so its owner fills or replaces it between the steps; a state that is to have one has it before its first draw. Log
    probabilities are of the distribution before it."""
    parameters: tuple[int | float, ...] | None = None
    """The fields of ROW without the position; None for the most likely token."""

    @classmethod
    def of(
        cls, request: Request, vocab_size: int, biases: Biases | None = None, elder: SamplingState | None = None
    ) -> SamplingState:
        """`biases` are those of the request's parameters; `elder` is another choice of the request that has drawn nothing yet."""
        params = request.sampling_params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        # A tokenizer may know end ids beyond the model's vocabulary.
        stops = {token_id for token_id in stops if token_id < vocab_size}
        masked = tuple(sorted(stops)) if params.min_tokens else ()
        biases = biases or Biases(params)
        assert biases.params is params
        counts = None
        if _has_penalties(params):
            known = None if elder is None else elder.counts
            counts = TokenCounts.of(request.prompt_token_ids) if known is None else known.begin_again()
        return cls(request, masked, biases, counts, parameters=_parameters(request))

    @property
    def position(self) -> int:
        return len(self.request.output_token_ids)

    @property
    def masked(self) -> bool:
        return self.position < self.request.sampling_params.min_tokens and bool(self.masked_until_min_tokens)

    @property
    def may_adjust(self) -> bool:
        """Whether any draw may have an adjustment."""
        biased = bool(self.request.sampling_params.logit_bias or self.masked_until_min_tokens)
        return biased or self.mask is not None or self.counts is not None

    def adjustment(self) -> Adjustment | None:
        """What changes the model's logits before this state's next draw."""
        params = self.request.sampling_params
        if self.mask is None and self.counts is None and not params.logit_bias and not self.masked:
            return None
        bias_ids, bias = self.biases.beside(self.masked_until_min_tokens if self.masked else ())
        seen, counts = (None, None) if self.counts is None else self.counts.advance(self.request.output_token_ids)
        return Adjustment(
            self.mask,
            bias_ids,
            bias,
            seen,
            counts,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )


def _has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _parameters(request: Request) -> tuple[int | float, ...] | None:
    params = request.sampling_params
    if params.greedy:
        return None
    min_p_log = math.log(params.min_p) if params.min_p > 0 else -math.inf
    share = int(params.top_p * 2**SHARE_BITS)
    return (request.seed & 2**64 - 1, request.choice, share, 1 / params.temperature, min_p_log, params.top_k, 0)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why no token could be drawn."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(failure(error))


Note = TokenLogprob | Failure
"""What there is to say of a draw besides its token."""


def failure(error: Exception) -> str:
    """What the client of a failed request is told. What is not expected is logged with its trace."""
    if isinstance(error, EngineError):
        return str(error)
    import logging  # a start has no use for it

    logging.getLogger("kvist").error("A request failed in the engine.", exc_info=error)
    return f"The engine failed this request: {type(error).__name__}: {error}."


class Sampler:
    """Draws the tokens of one engine's steps. What requests ask is lowered once, and kept while the same ones draw together, as
    they do from step to step: little of what a draw needs is in the processor's caches after a forward pass."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._plan: _Plan | None = None

    def sample(self, logits: F32, states: list[SamplingState]) -> tuple[list[int], dict[int, Note]]:
        """A token for each row of `logits` [rows, vocabulary], and notes by row; row i belongs to states[i]. What fails one row
        leaves the others; the token of a row that failed means nothing."""
        plan = self._plan
        if plan is None or states != plan.states:
            plan = self._plan = _Plan(self._ops, states)
        notes: dict[int, Note] = {}
        adjustments = {} if plan.steady else plan.prepare(notes)
        token_ids, outcomes = self._ops.sample(logits, plan.sampling, adjustments)
        if any(outcomes):
            for row, outcome in enumerate(outcomes):
                if outcome != DRAWN and row not in notes:
                    notes[row] = Failure.of(EngineError(REASONS[outcome]))
        if plan.scored:
            tops = {row: num_top for row, num_top in plan.scored.items() if row not in notes}
            notes |= self._score(logits, token_ids, tops)
        return token_ids, notes

    def _score(self, logits: F32, token_ids: list[int], tops: dict[int, int]) -> dict[int, TokenLogprob]:
        """By row, for the rows in `tops`."""
        rows = list(tops)
        found = score(self._ops, logits, rows, [token_ids[row] for row in rows], list(tops.values())) if rows else []
        return dict(zip(rows, found, strict=True))


class _Plan:
    """A step's states as one call takes them, and which of them need something before each draw."""

    def __init__(self, ops: Ops, states: list[SamplingState]) -> None:
        self.states = states
        self._words = array("Q", bytes(ROW.itemsize * len(states)))
        rows = np.frombuffer(self._words, ROW)
        self._random: list[tuple[int, SamplingState]] = []
        """Rows that are drawn at random, by the place of their position, which no other row reads."""
        self._adjusted = [(row, state) for row, state in enumerate(states) if state.may_adjust]
        self.scored: dict[int, int] = {}
        """How many of the likeliest tokens are asked for, by row."""
        for row, state in enumerate(states):
            if state.parameters is not None:
                rows[row] = (*state.parameters[:2], 0, *state.parameters[2:])
                self._random.append((row * WORDS_A_ROW + POSITION_WORD, state))
            if (num_top := state.request.sampling_params.logprobs) is not None:
                self.scored[row] = num_top
        self.steady = not (self._random or self._adjusted)
        """No draw needs anything that another did not."""
        self.sampling = ops.bind_sampling(rows)

    def prepare(self, notes: dict[int, Note]) -> dict[int, Adjustment]:
        """Move on to the next draw: what changes the rows' logits. Notes the rows that fail already here."""
        adjustments: dict[int, Adjustment] = {}
        for word, state in self._random:
            self._words[word] = state.position
        for row, state in self._adjusted:
            try:
                change = state.adjustment()
            except Exception as error:
                notes[row] = Failure.of(error)
            else:
                if change is not None:
                    adjustments[row] = change
        return adjustments


def score(ops: Ops, logits: F32, rows: Sequence[int], token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log probability and rank (1: the likeliest) of token_ids[i] in the model's own distribution in row rows[i], with its tops[i]
    likeliest tokens. Raises EngineError when one of the rows holds no number."""
    scores = ops.score(logits, np.array(rows, np.int32), np.array(token_ids, np.int32), np.array(tops, np.int32))
    if not scores.totals.all():
        raise EngineError(REASONS[NO_NUMBER])
    found = []
    columns = (scores.logits, scores.peaks, scores.totals, scores.ranks, scores.top_ids, scores.top_logits)
    for token_id, num_top, (logit, peak, total, rank, ids, values) in zip(
        token_ids, tops, zip(*(column.tolist() for column in columns), strict=True), strict=True
    ):
        log_total = peak + math.log(total * 2.0**-WEIGHT_BITS)
        count = min(num_top, logits.shape[1])
        top = tuple((index, value - log_total) for index, value in zip(ids[:count], values[:count], strict=True))
        found.append(TokenLogprob(token_id, logit - log_total, rank, top))
    return found
