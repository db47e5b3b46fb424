"""Which requests the engine takes: every refusal that needs no engine state, so that any thread can ask before anything is queued.

One rule for the budget: a prompt must leave room for one new token, or fill the context exactly when none is asked for (scoring);
`max_tokens` beyond the context is cut to it, and the request then ends with "length".
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.config import EngineConfig
from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.request import SamplingParams


def check_request(config: EngineConfig, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
    """The request's budget of new tokens. Raises InvalidRequestError, and ContextLengthError with both sizes."""
    # First what costs nothing: looking at each of a million ids takes long.
    budget = _budget(config, len(prompt_token_ids), params.max_tokens)
    _check_ids(prompt_token_ids, config.model.vocab_size)
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        # That none is negative is known.
        if (highest := max(ids, default=0)) >= config.model.vocab_size:
            raise InvalidRequestError(
                f"{name} names token {highest}, but the model's vocabulary has {config.model.vocab_size} tokens.", param=name
            )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}; raise one or lower the other.",
            param="min_tokens",
        )
    return budget


def _check_ids(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_token_ids:
        raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
    if set(map(type, prompt_token_ids)) != {int}:
        wrong = next(token_id for token_id in prompt_token_ids if type(token_id) is not int)
        raise InvalidRequestError(f"The prompt's token ids must be whole numbers, not {wrong!r}.", param="prompt")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"The prompt holds token {wrong}, but the model's vocabulary has {vocab_size} tokens.", param="prompt"
        )


def _budget(config: EngineConfig, num_prompt_tokens: int, max_tokens: int | None) -> int:
    limit = config.effective_max_len
    if num_prompt_tokens > limit or (num_prompt_tokens == limit and max_tokens != 0):
        new = "" if num_prompt_tokens > limit else ", which leaves no room for a new one"
        if config.pool_tokens < config.max_model_len:
            raise ContextLengthError(
                f"The prompt is too long: it needs {num_prompt_tokens} tokens of KV cache and the pool holds {limit}{new}; "
                "shorten it or start the engine with a larger pool."
            )
        raise ContextLengthError(
            f"The prompt is too long: it has {num_prompt_tokens} tokens and the context holds {limit}{new}; shorten it."
        )
    room = limit - num_prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)
