"""What a user asks for and what comes back: `SamplingParams`, `Request`, `RequestStatus` and the output records.

This module knows nothing of blocks, text or arrays. Invariants:

* `SamplingParams` is frozen and valid once constructed (NaN included: every range is checked as "inside", never as "not outside").
* `0 <= num_computed_tokens <= num_tokens`; `num_tokens == len(prompt_token_ids) + len(output_token_ids)`.
* The sources of a prompt's tokens are counted once: at the first admission (`num_cached_tokens`), never again after a preemption.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NamedTuple, NoReturn

from kvist.errors import InvalidRequestError
from kvist.kv.hints import KVHints

FinishReason = Literal["stop", "length", "abort", "error"]
EventKind = Literal["waiting", "started", "preempted", "stalled", "swapped", "resumed"]

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1000
STRUCTURED_OUTPUTS = "structured_outputs"
"""The stop reason, with finish reason "error", of a choice whose form could not be followed to its end: its client's mistake."""


def _inside(value: float, low: float, high: float, name: str, *, open_low: bool = False) -> None:
    """Refuse anything but a number in [low, high] (or (low, high]); NaN is inside nothing."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (ok and (value > low if open_low else value >= low) and value <= high):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}], not {value!r}.", param=name)


def _whole(value: int, low: int, high: int, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a whole number in [{low}, {high}], not {value!r}.", param=name)


def _tuple(value: Iterable[Any] | None, name: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable | None):
        raise InvalidRequestError(f"{name} takes a list, not {value!r}.", param=name)
    return tuple(value or ())


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output must have, in vLLM's words: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    `json` is a JSON schema (an object, true, or its text); `json_object` asks for any JSON object; `regex` has the syntax of Rust's
    `regex` crate and matches the whole output; `choice` lists the possible outputs; `grammar` is a Lark grammar as llguidance has
    it, its list of grammars as JSON, or GBNF. With `json` and `json_object`, `whitespace_pattern` is what may stand between JSON
    tokens, and `disable_any_whitespace` leaves none.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """Kept as its text."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """Kept as a tuple."""
    grammar: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "is True or False")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                self._refuse(name, "takes a string")
        object.__setattr__(self, "json", self._schema_text())
        if self.choice is not None:
            object.__setattr__(self, "choice", _tuple(self.choice, "structured_outputs.choice"))
            if not self.choice or not all(isinstance(text, str) for text in self.choice):
                self._refuse("choice", "takes a list of at least one string, and only strings")
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "has none of them"
            raise InvalidRequestError(
                f"structured_outputs takes one of json, json_object, regex, choice and grammar, but {what}.",
                param="structured_outputs",
            )
        if (self.whitespace_pattern is not None or self.disable_any_whitespace) and given[0] not in ("json", "json_object"):
            raise InvalidRequestError(
                f"Whitespace can be chosen for JSON only, not for structured_outputs.{given[0]}.", param="structured_outputs"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidRequestError(
                "structured_outputs: whitespace_pattern and disable_any_whitespace exclude each other; give one of them.",
                param="structured_outputs",
            )

    def _schema_text(self) -> str | None:
        """Numbers that JSON cannot hold and depths that it cannot print are refused here."""
        schema = self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                self._refuse("json", "is text, but not that of a JSON schema", shown=False)
        if not isinstance(schema, (Mapping, bool)):
            return None if schema is None else self._refuse("json", "takes a JSON schema (an object, or its text)")
        try:
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return self._refuse("json", f"takes a JSON schema, and this cannot be written as JSON ({error})", shown=False)

    def _refuse(self, name: str, why: str, *, shown: bool = True) -> NoReturn:
        param = f"structured_outputs.{name}"
        raise InvalidRequestError(f"{param} {why}{f', not {getattr(self, name)!r}' if shown else ''}.", param=param)

    @classmethod
    def of(cls, value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """The same, given as a dict too. Raises InvalidRequestError naming what is not offered."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"structured_outputs takes an object, not {value!r}.", param="structured_outputs")
        known = {field.name for field in fields(cls)}
        for name, given in value.items():
            if name not in known and given is not None and given is not False:
                raise InvalidRequestError(
                    f"structured_outputs.{name} is not offered; {', '.join(sorted(known))} are.", param=f"structured_outputs.{name}"
                )
        return cls(**{name: given for name, given in value.items() if name in known and given is not None})


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens. The names are those of vLLM and OpenAI.

    `max_tokens=None` runs to the end of the context. `logprobs=k` reports each chosen token's log probability and the `k` most
    likely ones (of the model's own distribution, before temperature and penalties). `prompt_logprobs=k` does the same for the
    prompt; such a request computes its whole prompt and takes no prefix hit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    """One string or several; kept as a tuple."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """The form that the output must have; it ends with "stop" as soon as the form is complete. Kept as StructuredOutputsParams."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop, "stop"))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids, "stop_token_ids"))
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidRequestError(
                f"logit_bias takes a dict from token ids to numbers, not {self.logit_bias!r}.", param="logit_bias"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is True or False, not {getattr(self, name)!r}.", param=name)
        _whole(self.n, 1, MAX_N, "n")
        _inside(self.temperature, 0.0, 100.0, "temperature")
        _inside(self.top_p, 0.0, 1.0, "top_p", open_low=True)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _whole(self.top_k, 0, 2**31 - 1, "top_k")
        _inside(self.min_p, 0.0, 1.0, "min_p")
        _inside(self.presence_penalty, -2.0, 2.0, "presence_penalty")
        _inside(self.frequency_penalty, -2.0, 2.0, "frequency_penalty")
        _inside(self.repetition_penalty, 0.0, 100.0, "repetition_penalty", open_low=True)
        if self.max_tokens is not None:
            _whole(self.max_tokens, 0, 2**31 - 1, "max_tokens")
        _whole(self.min_tokens, 0, 2**31 - 1, "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(getattr(self, name), 0, MAX_LOGPROBS, name)
        if self.seed is not None:
            _whole(self.seed, -(2**63), 2**64 - 1, "seed")
        for token_id in self.stop_token_ids:
            _whole(token_id, 0, 2**31 - 1, "stop_token_ids")
        for token_id, bias in self.logit_bias.items():
            _whole(token_id, 0, 2**31 - 1, "logit_bias")
            _inside(bias, -100.0, 100.0, "logit_bias")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}.", param="stop")
        if any(not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidRequestError(f"stop takes strings of 1 to {MAX_STOP_CHARACTERS} characters only.", param="stop")

    @property
    def greedy(self) -> bool:
        """Temperatures under 1e-5 divide logits beyond what f32 holds, and mean "the most likely token" anyway."""
        return self.temperature < 1e-5


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class PrefixMiss(NamedTuple):
    """Why a prefix hit ended where it did. `reason` is `never_seen` (the block there was never in the cache), `evicted`, `expired`
    (evicted after the time for which it was to be kept), `rewritten` (the prompt differs in the middle of a known conversation),
    `other_salt`, `other_format` (kept behind the owner's key without its salt, or on disk in another format: `would_hit` tokens,
    `kept_as`), `not_found` (no record of whether it was there), `partial_block` (all whole blocks of the prompt were found, and of
    the rest no more), `last_token` (all but that, which is always computed), `whole_prompt` (shared with another choice of the
    request), or no look-up was made: `prompt_logprobs` (scores need each prompt token computed), `caching_off`. Times: seconds."""

    reason: str
    position: int
    """The first prompt token that the hit does not cover; within a block, it differs from what was copied up to there."""
    evicted_ago: float | None = None
    would_hit: int | None = None
    kept_as: str | None = None


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened to a request on its way, recorded for those who asked (`Request.wants_events`). `details` are numbers and
    short words, and name no other request."""

    request_id: str
    kind: EventKind
    """waiting: not admitted in the step at which it could have been; started: admitted after that. preempted (its blocks were
    taken) and stalled (it kept them, and got no more) end with resumed; swapped: its blocks moved to another tier."""
    details: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass
class Request:
    """One sequence to generate (choice `choice` of a user's request), as the scheduler and the KV manager see it.

    The owner is the engine thread; only the scheduler changes `status`, `num_computed_tokens` and `output_token_ids`.
    """

    request_id: str
    prompt_token_ids: list[int]
    """The choices of one user's request share the list itself, and by that are known to belong together."""
    sampling_params: SamplingParams
    max_tokens: int
    """The budget of new tokens, resolved: never None, prompt + max_tokens never beyond the effective context."""
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    """The resolved seed: the request's own, or one drawn for it at arrival."""
    choice: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    priority: int = 0
    """Smaller is served earlier."""
    wants_events: bool = False
    kv: KVHints | None = None
    """How long to keep the prompt's blocks."""

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    """Of the cached ones, what was brought back from the disk tier for this request."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_scheduled_time: float | None = None
    stall_time: float = 0.0
    """Seconds after the first admission in which it got no rows for want of blocks: preempted, or standing still."""
    prefix_miss: PrefixMiss | None = None
    """Set at the first admission."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The goal that `num_computed_tokens` catches up with."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling_params.prompt_logprobs is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability, and the most likely alternatives as (token id, log probability), likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def prompt_sources(num_prompt: int, num_cached: int, num_disk: int) -> dict[str, int]:
    """Where prompt tokens came from, each counted once: computed, found on the device, brought from the disk tier."""
    return {"computed": num_prompt - num_cached, "prefix_hit": num_cached - num_disk, "disk_hit": num_disk}


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Where each prompt token came from (they add up), and what the request went through. Times in seconds."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int = 0
    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    stall_time: float = 0.0
    prefix_miss: PrefixMiss | None = None
    """None where the request ended before it was admitted."""
    num_disk_tokens: int = 0
    """Of the cached ones."""

    @property
    def prompt_tokens_by_source(self) -> dict[str, int]:
        """They add up to the prompt."""
        return prompt_sources(self.num_prompt_tokens, self.num_cached_tokens, self.num_disk_tokens)


class OutputDelta(NamedTuple):
    """What one step added to one choice of a request; `finish_reason` is set once, in the last. One is made for every token: as a
    frozen dataclass it would take seven times as long."""

    request_id: str
    """The user's request id (shared by its `n` choices)."""
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not needed
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In the first delta that is not of events alone: one entry per prompt token, the first None."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: RequestUsage | None = None
    """In the last delta."""
    error: str | None = None
    """With finish_reason "error": what went wrong, for the client."""
    events: tuple[RequestEvent, ...] = ()
    """In the order in which they happened, before the delta's tokens."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: RequestUsage | None = None
    finished: bool = True
