"""`LLM`: the engine for a script that has all its prompts at hand. It adds no behaviour of its own to `Engine`.

    with LLM("smollm2:135m") as llm:
        for output in llm.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

It knows no HTTP and no event loop. Calls from several threads take turns.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvist.config import DEFAULT_MODEL, EngineConfig, EngineOptions
from kvist.engine.engine import Engine
from kvist.errors import ConfigError, EngineError, EngineStoppedError, InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.request import (
    STRUCTURED_OUTPUTS,
    CompletionOutput,
    FinishReason,
    OutputDelta,
    RequestOutput,
    RequestUsage,
    SamplingParams,
    TokenLogprob,
)

Prompt = str | Mapping[str, Sequence[int]]
Params = SamplingParams | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model. `options` are the fields of `EngineOptions`; `report` gets sentences about what was resolved.

    Raises ConfigError for options that cannot be, ModelError when the model cannot be had.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, report: Callable[[str], None] | None = None, **options: Any) -> None:
        known = {field.name for field in fields(EngineOptions)}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(f"LLM has no option named {', '.join(unknown)}; it takes {', '.join(sorted(known))}.")
        self._lock = threading.Lock()
        self._count = 0
        self._engine: Engine | None = Engine.from_options(
            EngineOptions(model=str(model) if isinstance(model, Path) else model, **options), report=report
        )

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        llm = cls.__new__(cls)
        llm._lock, llm._count, llm._engine = threading.Lock(), 0, engine
        return llm

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineStoppedError("This LLM is closed; make a new one.")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        kv: KVHints | Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (strings, or {"prompt_token_ids": [...]}), with one set of parameters for all or one for each; outputs
        come in the order of the prompts. `kv` says how long to keep the prompts' keys and values (pin, ttl, priority).
        Raises InvalidRequestError before any work when one of them cannot be run."""
        several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        ids = [self._encode(prompt) for prompt in several]
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        return self._run(ids, texts, sampling_params, kv)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        kv: KVHints | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several. `template_options` are those of
        `ChatTemplate.render` (tools, add_generation_prompt ...), `chat_template_kwargs` the template's own variables."""
        options = {**(chat_template_kwargs or {}), **template_options}
        ids = [self.engine.render_chat(talk, **options) for talk in _conversations(messages)]
        return self._run(ids, [None] * len(ids), sampling_params, kv)

    def close(self) -> None:
        """Give the memory back. Twice is harmless."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"}:
            raise InvalidRequestError('A prompt is a string or {"prompt_token_ids": [...]}.', param="prompt")
        try:
            return [operator.index(token_id) for token_id in prompt["prompt_token_ids"]]
        except TypeError as error:
            raise InvalidRequestError(f"prompt_token_ids takes a list of whole numbers: {error}.", param="prompt") from error

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        sampling_params: Params | Sequence[Params] | None,
        kv: KVHints | Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        params = _one_for_each(sampling_params, len(prompts))
        hints = _as_hints(kv)
        with self._lock:
            engine, collected = self.engine, {}
            try:
                for prompt, text, wanted in zip(prompts, texts, params, strict=True):
                    request_id = f"llm-{self._count}"
                    self._count += 1
                    engine.add_request(request_id, prompt, wanted, kv=hints)
                    collected[request_id] = _Collected(request_id, text, prompt, [_Choice() for _ in range(wanted.n)])
                while engine.has_work:
                    for delta in engine.step():
                        collected[delta.request_id].add(delta)
            except BaseException:
                for request_id in collected:
                    engine.abort(request_id)
                engine.drop_pending()
                raise
            engine.check_idle()
        return [request.output() for request in collected.values()]


def _conversations(messages: Messages | Sequence[Messages]) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) as a list of one; several as they are. Raises InvalidRequestError."""
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [[dict(message) for message in messages if isinstance(message, Mapping)]]
    talks = []
    for talk in messages:
        if isinstance(talk, (str, Mapping)) or not all(isinstance(message, Mapping) for message in talk):
            raise InvalidRequestError('A conversation is a list of {"role": ..., "content": ...}.', param="messages")
        talks.append([dict(message) for message in talk])
    return talks


def _one_for_each(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if not isinstance(params, Sequence):
        return [_as_params(params)] * count
    several = [_as_params(one) for one in params]
    if len(several) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(several)} sampling parameters; give one for all or one for each.",
            param="sampling_params",
        )
    return several


def _as_hints(kv: KVHints | Mapping[str, Any] | None) -> KVHints | None:
    if kv is None or isinstance(kv, KVHints):
        return kv
    if not isinstance(kv, Mapping) or not set(kv) <= {"pin", "ttl", "priority"}:
        raise InvalidRequestError("kv takes pin, ttl and priority.", param="kv")
    return KVHints(**kv)


def _as_params(params: Params | None) -> SamplingParams:
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    if not isinstance(params, Mapping):
        raise InvalidRequestError(f"sampling_params takes SamplingParams or a dict, not {params!r}.", param="sampling_params")
    known = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(str(name) for name in params.keys() - known):
        raise InvalidRequestError(f"SamplingParams has no field named {', '.join(unknown)}.", param=unknown[0])
    return SamplingParams(**params)


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class _Collected:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[_Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: RequestUsage | None = None

    def add(self, delta: OutputDelta) -> None:
        """Raises EngineError when the engine failed the request, InvalidRequestError when it asked for what cannot be done."""
        if delta.finish_reason == "error":
            if delta.stop_reason == STRUCTURED_OUTPUTS:
                raise InvalidRequestError(delta.error or "", param="structured_outputs")
            raise EngineError(delta.error or "The engine failed this request.")
        choice = self.choices[delta.index]
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.index == 0 and delta.usage is not None:
            self.usage = delta.usage

    def output(self) -> RequestOutput:
        outputs = [
            CompletionOutput(index, "".join(one.texts), one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
            for index, one in enumerate(self.choices)
        ]
        cached = self.usage.num_cached_tokens if self.usage else 0
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, cached, self.prompt_logprobs, self.usage)
