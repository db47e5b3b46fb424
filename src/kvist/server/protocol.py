"""Request bodies: every field of OpenAI's chat and completions requests is honoured, or refused by name with a 400.

Knows the fields' types and neutral values; ranges of sampling values are `SamplingParams`' own. `null` means "not given", as with
OpenAI. Wrong types are never converted: `"temperature": "0.5"` is a mistake, not a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, ValidationError, model_validator

from kvist.errors import InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.request import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams, StructuredOutputsParams
from kvist.server.forms import GUIDED, requested_form
from kvist.server.tools import ToolUse, requested_tools
from kvist.server.unoffered import HARMLESS, INSTEAD, NEUTRAL

MAX_PROMPTS = 1024
MAX_CHOICES = 2048
"""Of one request: the engine takes them in between two steps of everybody."""

MANY_BIASES = 1000
"""More of them are looked at in a thread, so that others' streams go on."""

UsageInStream = Literal["none", "last", "every chunk"]


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt as one. Raises InvalidRequestError."""
    if isinstance(value, str):
        return [value]
    wrong = InvalidRequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty.",
        param="prompt",
    )
    if not isinstance(value, list) or not value:
        raise wrong
    if _all_ids(value):
        return [value]
    if not (all(isinstance(item, str) for item in value) or all(isinstance(item, list) and _all_ids(item) for item in value)):
        raise wrong
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt takes at most {MAX_PROMPTS} prompts, not {len(value)}.", param="prompt")
    return value


def _numbers(value: Any) -> Any:
    """Stop at the first mistake: to list all of a large body's takes long, and one is told."""
    if isinstance(value, dict) and any(type(number) not in (int, float) for number in value.values()):
        raise InvalidRequestError("logit_bias takes an object of numbers by token id.", param="logit_bias")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(value)}.", param="stop")
    return value


def _all_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: every chunk carries the usage of its choice so far."""
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _offered(self) -> Self:
        if self.include_obfuscation:
            raise InvalidRequestError(
                "stream_options.include_obfuscation is not offered; leave it out.", param="stream_options.include_obfuscation"
            )
        if self.continuous_usage_stats and not self.include_usage:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats needs stream_options.include_usage to be true.",
                param="stream_options.continuous_usage_stats",
            )
        return self


class KVOptions(BaseModel):
    """How long to keep the prompt's blocks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pin: bool | None = None
    ttl: float | None = None
    priority: int | None = None

    @property
    def hints(self) -> KVHints:
        """Raises InvalidRequestError."""
        return KVHints(self.pin or False, self.ttl, self.priority)


class GenerationRequest(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] = Field(default_factory=dict)
    stop: Annotated[str | list[str], BeforeValidator(_few)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """vLLM's: smaller is served earlier."""
    kv: KVOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
        return self

    @property
    def usage_in_stream(self) -> UsageInStream:
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "every chunk" if options.continuous_usage_stats else "last"

    @property
    def kv_hints(self) -> KVHints | None:
        """Raises InvalidRequestError."""
        return None if self.kv is None else self.kv.hints

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form asked of the output. Raises InvalidRequestError."""
        guided = {name: getattr(self, f"guided_{name}") for name in (*GUIDED, "whitespace_pattern")}
        return requested_form(self.response_format, self.structured_outputs, guided)

    @property
    def form_field(self) -> str | None:
        """The field to blame for a form that is none; None where the form names its own."""
        return next(
            (name for name in ("response_format", *(f"guided_{kind}" for kind in GUIDED)) if getattr(self, name) is not None), None
        )

    @property
    def has_many_biases(self) -> bool:
        """`sampling` takes long."""
        return len(self.logit_bias) > MANY_BIASES

    def sampling(
        self,
        vocab_size: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        form: StructuredOutputsParams | None,
        prompt_logprobs: int | None = None,
        skip_special_tokens: bool = True,
    ) -> SamplingParams:
        """The request as SamplingParams. Raises InvalidRequestError naming the field."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_bias(self.logit_bias, vocab_size),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=self.seed,
            skip_special_tokens=self.skip_special_tokens and skip_special_tokens,
            structured_outputs=form,
        )


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Without a budget an answer runs to its end or to the end of the context."""

    messages: Annotated[list[dict[str, Any]], FailFast()]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; give one of them.",
                param="continue_final_message",
            )
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """What may be called. Raises InvalidRequestError."""
        return requested_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def budget(self) -> int | None:
        """The newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `max_tokens` 0 scores the prompt (with `echo` and `logprobs`)."""

    prompts: Annotated[list[str | list[int]], PlainValidator(_prompts)] = Field(alias="prompt")
    """One entry per prompt, text or token ids."""
    max_tokens: int = Field(default=16, ge=0)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequestError("best_of other than n is not offered; leave it out.", param="best_of")
        return self

    @model_validator(mode="after")
    def _few_choices(self) -> Self:
        if (choices := len(self.prompts) * self.n) > MAX_CHOICES:
            raise InvalidRequestError(
                f"n for each prompt makes {choices} choices, and {MAX_CHOICES} are the most; send several requests.", param="n"
            )
        return self


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequestError(
                f"logit_bias: {key[:40]!r} is not a token id of this model (0 to {vocab_size - 1}).", param="logit_bias"
            )
        result[int(key)] = value
    return result


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse_request(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    """A body as a request. Raises InvalidRequestError naming the first field that is wrong, unknown or not offered."""
    known = {field.alias or name for name, field in kind.model_fields.items()}
    fields = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in NEUTRAL and name not in kind.model_fields:
            if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
                remedy = INSTEAD.get(name, "leave it out")
                raise InvalidRequestError(f"{name} with this value is not offered by this server; {remedy}.", param=name)
            continue
        if name not in known:
            raise InvalidRequestError(f"{name[:80]} is not a field that this server knows; leave it out.", param=name[:80])
        fields[name] = value
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> InvalidRequestError:
    """The first mistake, in a sentence."""
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, InvalidRequestError):
        return own
    param = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "missing":
            message = f"{param} is missing."
        case "extra_forbidden":
            message = f"{param} is not a field that this server knows; leave it out."
        case "model_type" | "dict_type":
            message = f"{param} must be an object."
        case _ if first["loc"][0] == "stop":
            param, message = "stop", "stop must be a string or a list of strings."
        case _ if first["loc"][0] == "prompt" and len(first["loc"]) > 1:
            param, message = "prompt", "prompt must be a string or a list of token ids."
        case _:
            message = f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}."
    return InvalidRequestError(message, param=param)
