"""From logits to token ids: the sampling twin in NumPy, which defines what a native sampler must do.

Each row is computed by itself, in float32 with sums in float64, from its own logits, tokens, seed and position, so that its bits
never depend on the batch; only the plain greedy case is done for all rows at once (an argmax has no arithmetic to reorder). One
uniform number is drawn per token, from a counter-based generator keyed by (seed, choice, position), and the token is found by
inverse CDF in ascending order of ids. Ties go to the lowest id everywhere.

The order of the steps is vLLM's: logit bias, minimum length, penalties, mask, temperature, min-p, top-k, top-p. Log
probabilities are those of the model's own distribution, before all of it. This module knows no text, no blocks and no scheduler.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x64-10).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvist.errors import EngineError
from kvist.kernels.ops import F32
from kvist.request import Request, SamplingParams, TokenLogprob

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
logger = logging.getLogger("kvist")
_MASK64 = 2**64 - 1
SPAN = 256


@dataclass
class TokenCounts:
    """What the penalties need of a request's tokens, kept up to date as the output grows."""

    in_prompt: npt.NDArray[np.bool_]
    in_output: npt.NDArray[np.int64]
    num_counted: int = 0

    @classmethod
    def of_prompt(cls, prompt_token_ids: Sequence[int], vocab_size: int) -> TokenCounts:
        seen = np.zeros(vocab_size, np.bool_)
        seen[np.asarray(prompt_token_ids, np.int64)] = True
        return cls(seen, np.zeros(vocab_size, np.int64))

    def advance(self, output_token_ids: Sequence[int]) -> None:
        np.add.at(self.in_output, np.asarray(output_token_ids[self.num_counted :], np.int64), 1)
        self.num_counted = len(output_token_ids)


@dataclass
class SamplingState:
    """One choice's side of sampling. The next token's position in the output is the length of the output so far."""

    request: Request
    masked_until_min_tokens: tuple[int, ...]
    """EOS and stop ids: impossible while the output is shorter than `min_tokens`."""
    counts: TokenCounts | None = field(default=None)
    mask: npt.NDArray[np.uint32] | None = None
    """Which tokens may come next: bit `token % 32` of word `token // 32`, [ceil(vocabulary / 32)]; None for all. Looked up at each
    draw, so its owner fills or replaces it between the steps. Log probabilities are of the distribution before it."""

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> SamplingState:
        params = request.sampling_params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        # A tokenizer may know end ids beyond the model's vocabulary.
        stops = {token_id for token_id in stops if token_id < vocab_size}
        counts = TokenCounts.of_prompt(request.prompt_token_ids, vocab_size) if _has_penalties(params) else None
        return cls(request, tuple(sorted(stops)) if params.min_tokens else (), counts)

    @property
    def position(self) -> int:
        return len(self.request.output_token_ids)

    @property
    def masked(self) -> bool:
        return self.position < self.request.sampling_params.min_tokens and bool(self.masked_until_min_tokens)

    @property
    def plain_greedy(self) -> bool:
        """The most likely token of the raw logits: no step before it changes them."""
        params = self.request.sampling_params
        return params.greedy and not params.logit_bias and self.counts is None and not self.masked and self.mask is None


def _has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; or, with `error`, the reason why none could be drawn (the token id is then meaningless)."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None

    @classmethod
    def failed(cls, error: Exception) -> Sampled:
        return cls(0, error=failure(error))


def failure(error: Exception) -> str:
    """What the client of a failed request is told. What is not expected is logged with its trace."""
    if isinstance(error, EngineError):
        return str(error)
    logger.error("A request failed in the engine.", exc_info=error)
    return f"The engine failed this request: {type(error).__name__}: {error}."


def sample(logits: F32, states: Sequence[SamplingState]) -> list[Sampled]:
    """One token for each row of `logits` [rows, vocabulary]; row i belongs to states[i]."""
    greedy_ids = [0] * len(states)
    plain = np.zeros(len(states), np.bool_)
    plain[:] = [state.plain_greedy for state in states]
    if plain.any():
        ids = logits.argmax(axis=1)
        plain &= np.isfinite(logits[np.arange(len(states)), ids])
        greedy_ids = ids.tolist()
    drawn = []
    for row, state in enumerate(states):
        try:
            token_id = greedy_ids[row] if plain[row] else sample_row(logits[row], state)
            wanted = state.request.sampling_params.logprobs
            drawn.append(Sampled(token_id, None if wanted is None else token_logprob(logits[row], token_id, wanted)))
        except Exception as error:
            drawn.append(Sampled.failed(error))
    return drawn


def sample_row(row: F32, state: SamplingState) -> int:
    """The next token of one request, from its own logits. Raises EngineError when they hold no number."""
    params = state.request.sampling_params
    logits = _finite(row).copy()
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
    if state.masked:
        logits[list(state.masked_until_min_tokens)] = -np.inf
    if state.counts is not None:
        state.counts.advance(state.request.output_token_ids)
        _penalize(logits, state.counts, params)
        # A tiny or large factor leads beyond float32.
        logits = _finite(logits)
    if state.mask is not None:
        _allow(logits, state.mask)
    if params.greedy:
        return int(logits.argmax())
    logits -= logits.max()
    logits *= np.float32(1 / params.temperature)
    kept = _kept(logits, params)
    weights = np.exp(logits if kept is None else logits[kept])
    place = pick(weights, uniform(state.request.seed, state.request.choice, state.position))
    return place if kept is None else int(kept[place])


def pick(weights: F32, share: float) -> int:
    """The first place where the weights before it and its own exceed `share` (in [0, 1)) of them all; never one of weight 0.

    Weights are summed in float64, in spans of SPAN first: a running sum over a whole vocabulary is one long chain of additions.
    """
    exact = weights.astype(np.float64)
    starts = np.arange(0, len(exact), SPAN)
    reached = np.cumsum(np.add.reduceat(exact, starts))
    target = share * reached[-1]
    span = _first_above(reached, target)
    within = np.cumsum(exact[starts[span] : starts[span] + SPAN])
    return int(starts[span]) + _first_above(within, target - (reached[span - 1] if span else 0.0))


def _first_above(reached: F64, target: float) -> int:
    """The first index that exceeds the target; where rounding leaves none, the last that added anything."""
    return int(min(np.searchsorted(reached, target, side="right"), np.searchsorted(reached, reached[-1], side="left")))


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its three keys alone: the high 53 bits of the first word of Philox 4x64-10 with key
    (seed, choice) and counter `position`. NumPy's generator adds one to its counter before its first block."""
    key = np.array([seed & _MASK64, choice], np.uint64)
    generator = np.random.Philox(key=key, counter=(position - 1) % 2**256)
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def _finite(row: F32) -> F32:
    """The row itself, or a copy in which what is not a number cannot be drawn. Raises EngineError when nothing is left."""
    if np.isfinite(row.max()):
        return row
    logits = np.where(np.isnan(row), np.float32(-np.inf), np.minimum(row, np.finfo(np.float32).max))
    if logits.max() == -np.inf:
        raise EngineError("The model's logits hold no finite number for this request.")
    return logits


@np.errstate(over="ignore", divide="ignore")
def _penalize(logits: F32, counts: TokenCounts, params: SamplingParams) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, section 4.1); frequency and presence over the output."""
    if params.repetition_penalty != 1:
        seen = np.flatnonzero(counts.in_prompt | (counts.in_output > 0))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    seen = np.flatnonzero(counts.in_output)
    logits[seen] -= params.frequency_penalty * counts.in_output[seen] + params.presence_penalty


def _allow(logits: F32, mask: npt.NDArray[np.uint32]) -> None:
    """Rule out what the mask does not allow. Raises EngineError when nothing is left."""
    assert len(mask) == -(-len(logits) // 32)
    allowed = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[: len(logits)]
    logits[allowed == 0] = -np.inf
    if logits.max() == -np.inf:
        raise EngineError("No token is left for this request: the constraint on its output allows none that can be drawn.")


def _kept(logits: F32, params: SamplingParams) -> Ids | None:
    """Ids that min-p, top-k and top-p leave, ascending; None for all. `logits` are scaled, with a maximum of 0."""
    kept: Ids | None = None
    if params.min_p > 0:
        kept = np.flatnonzero(logits >= np.float32(math.log(params.min_p)))
    if params.top_k > 0:
        kept = _narrow(logits, kept, params.top_k)
    if params.top_p < 1:
        kept = _nucleus(logits, kept, params.top_p)
    return kept


def _narrow(logits: F32, among: Ids | None, k: int) -> Ids:
    values = logits if among is None else logits[among]
    places = np.sort(top_indices(values, k))
    return places if among is None else among[places]


def _nucleus(logits: F32, among: Ids | None, top_p: float) -> Ids:
    """The fewest of the likeliest tokens whose probabilities reach `top_p`; sorts no more of the vocabulary than it has to."""
    values = logits if among is None else logits[among]
    weights = np.exp(values)
    goal = top_p * weights.sum(dtype=np.float64)
    size = min(256, len(values))
    while True:
        places = top_indices(values, size)
        reached = np.cumsum(weights[places], dtype=np.float64)
        if reached[-1] >= goal or size == len(values):
            break
        size = min(size * 16, len(values))
    count = min(int(np.searchsorted(reached, goal, side="left")) + 1, len(places))
    kept = np.sort(places[:count])
    return kept if among is None else among[kept]


def top_indices(values: F32, k: int) -> Ids:
    """Indices of the k largest values, largest first, ties by index: exactly min(k, len(values)) of them."""
    if k < len(values):
        threshold = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > threshold)
        places = np.concatenate([above, np.flatnonzero(values == threshold)[: k - len(above)]])
    else:
        places = np.arange(len(values))
    return places[np.lexsort((places, -values[places]))]


def token_logprob(row: F32, token_id: int, num_top: int) -> TokenLogprob:
    """Log probability and rank (1: the likeliest) of one token in the model's own distribution, with the `num_top` likeliest."""
    logits = _finite(row)
    peak = logits.max()
    log_total = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    value = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))
    top = top_indices(logits, num_top) if num_top else np.empty(0, np.int64)
    alternatives = tuple((int(index), float(logits[index]) - log_total) for index in top)
    return TokenLogprob(token_id, float(value) - log_total, rank, alternatives)
