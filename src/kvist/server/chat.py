"""`POST /v1/chat/completions`: messages in, chunks or an answer out.

Knows OpenAI's messages and chunks. Templates run in the engine's worker thread; what a template makes of roles is its own affair.
`developer` is the newer word for `system`, and templates know only the older one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvist.errors import InvalidRequestError
from kvist.request import OutputDelta, TokenLogprob
from kvist.server.answers import AnswerReader, Reading
from kvist.server.auth import salt_of
from kvist.server.body import read_body
from kvist.server.generation import Collected, Job, off_loop
from kvist.server.logprobs import TokenLabels, chat_entries
from kvist.server.protocol import ChatRequest, parse_request
from kvist.server.sse import DATA
from kvist.server.state import ServerState, state_of
from kvist.server.streaming import Frame, GenerationResponse, Plan, dumps, quoted
from kvist.server.tools import ToolUse

router = APIRouter()

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning"})
UNUSED_MESSAGE_FIELDS = frozenset({"annotations"})
UNUSED_PART_FIELDS = UNUSED_MESSAGE_FIELDS | {"cache_control", "prompt_cache_breakpoint"}
"""The latter say what to cache, which is found out here without a word."""
MANY_MESSAGES = 500
"""More of them are looked at in a thread, so that others' streams go on."""
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template", "self"})
"""What a client may not set in the template: fields of the request, and the template's own name for itself."""


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """OpenAI's chat completions."""
    state = state_of(request)
    with state.metrics.begin("chat") as record:
        state.queue.check()
        body = await read_body(request, state.options.max_body_bytes, partial(parse_request, ChatRequest))
        return GenerationResponse(state, await plan_chat(state, body, salt_of(request, body.cache_salt)), record)


async def plan_chat(state: ServerState, body: ChatRequest, salt: str) -> Plan:
    """What to run for a request. Raises InvalidRequestError and Refusal."""
    model = state.check_model(body.model)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = body.tool_use
    token_ids = await render(state, body, tools)
    answering = await state.abilities.plan_answer(state.engine.tokenizer, token_ids, tools, body.form)
    make_params = partial(
        body.sampling,
        state.engine.config.model.vocab_size,
        max_tokens=body.budget,
        logprobs=logprobs,
        form=answering.form,
        skip_special_tokens=not answering.show_special_tokens,
    )
    params = await off_loop(body.has_many_biases, make_params)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    job = Job(request_id, token_ids, params, salt, priority=body.priority, kv=body.kv_hints)
    form = ChatFormat(request_id, model, state.engine.config.profile, state.labels, body, answering.reading)
    blamed = "tools" if body.form is None and answering.form is not None else body.form_field
    return Plan((job,), form, body.stream, body.usage_in_stream, blamed)


async def render(state: ServerState, body: ChatRequest, tools: ToolUse | None) -> list[int]:
    """A conversation as token ids. Raises InvalidRequestError."""
    if state.engine.chat_template is None:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
    for name in body.chat_template_kwargs:
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot hold {name}; leave it out.", param=f"chat_template_kwargs.{name}"
            )
    messages = await off_loop(len(body.messages) > MANY_MESSAGES, partial(messages_of, body.messages))
    messages, told = state.abilities.show_tools(messages, tools)
    await state.check_size(sum(len(message["content"]) for message in messages), "messages")
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return await state.engine.render_chat(
        messages,
        add_generation_prompt=add_prompt,
        continue_final_message=body.continue_final_message,
        tools=told,
        **{**state.abilities.effort_variables(body.reasoning_effort), **body.chat_template_kwargs},
    )


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them: text content, parsed tool arguments. Raises InvalidRequestError naming the place."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None and name not in UNUSED_MESSAGE_FIELDS}
    for name in given:
        if name not in MESSAGE_FIELDS:
            raise InvalidRequestError(
                f"{place}.{name} is not a field that this server knows; leave it out.", param=f"{place}.{name}"
            )
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{place}.role must be one of {', '.join(sorted(ROLES))}.", param=f"{place}.role")
    for name in ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning"):
        if not isinstance(given.get(name, ""), str):
            raise InvalidRequestError(f"{place}.{name} must be a string.", param=f"{place}.{name}")
    if "content" not in given and not (
        role == "assistant" and {"tool_calls", "refusal", "reasoning_content", "reasoning"} & set(given)
    ):
        raise InvalidRequestError(f"{place}.content is missing.", param=f"{place}.content")
    if "reasoning" in given:
        given.setdefault("reasoning_content", given.pop("reasoning"))
    given["role"] = "system" if role == "developer" else role
    given["content"] = _content(given.get("content", ""), f"{place}.content")
    if "tool_calls" in given:
        if role != "assistant" or not isinstance(given["tool_calls"], list):
            raise InvalidRequestError(f"{place}.tool_calls must be a list in an assistant message.", param=f"{place}.tool_calls")
        given["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(given["tool_calls"])]
    return given


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be a string or a list of text parts.", param=place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequestError(f"{place}[{i}] must be a part of type text, not {kind!r}.", param=f"{place}[{i}]")
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place}[{i}].text must be a string.", param=f"{place}[{i}].text")
        if unknown := part.keys() - {"type", "text"} - UNUSED_PART_FIELDS:
            param = f"{place}[{i}].{min(unknown)[:80]}"
            raise InvalidRequestError(f"{param} is not a field that this server knows; leave it out.", param=param)
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    """A call of an earlier turn; templates take its arguments as an object, clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{place}.function must be an object with a name.", param=f"{place}.function")
    if not isinstance(call.get("id"), str | None) or call.get("type") not in (None, "function"):
        raise InvalidRequestError(f"{place} must have a string as its id, and the type function.", param=place)
    arguments = function.get("arguments", "{}")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(
            f"{place}.function.arguments must be the text of a JSON object.", param=f"{place}.function.arguments"
        )
    return {**call, "function": {**function, "arguments": parsed}}


class ChatFormat:
    """Chat chunks and answers. The constant parts of a chunk are made once; a token costs one string join."""

    prompt_param = "messages"

    def __init__(
        self, request_id: str, model: str, profile: str, labels: TokenLabels, body: ChatRequest, reading: Reading | None
    ) -> None:
        self._common = {"id": request_id, "created": int(time.time()), "model": model, "system_fingerprint": profile}
        self._chunk = {"object": "chat.completion.chunk", **self._common}
        self._head = DATA + dumps(self._chunk)[:-1] + ',"choices":[{"index":'
        self._labels = labels
        self._logprobs = body.logprobs
        self._started: set[int] = set()
        self._reading = reading
        self._plain = reading is None and not body.logprobs
        """A chunk in mid-answer holds a text and nothing else: nearly all are such, and take the short way."""
        self._readers: dict[int, AnswerReader] = {}

    def frame(self, choice: int) -> Frame | None:
        if not self._plain or choice not in self._started:
            return None
        return f'{self._head}{choice},"delta":{{"content":', '},"logprobs":null,"finish_reason":null'

    def events(self, choice: int, delta: OutputDelta, tail: str) -> Iterable[str]:
        if delta.finish_reason is None and (frame := self.frame(choice)):
            return (f"{frame[0]}{quoted(delta.text)}{frame[1]}{tail}",) if delta.text else ()
        return self._all_events(choice, delta, tail)

    def _all_events(self, choice: int, delta: OutputDelta, tail: str) -> Iterator[str]:
        head = f"{self._head}{choice}"
        if choice not in self._started:
            self._started.add(choice)
            yield f'{head},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null{tail}'
        reason = delta.finish_reason
        shown: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        if self._reading is not None:
            reader = self._readers.get(choice) or self._readers.setdefault(choice, self._reading.reader())
            shown = reader.push(delta.text, last=reason is not None)
            reason = self._reading.finish_reason(reason, bool(reader.calls))  # type: ignore[assignment]
        for i, piece in enumerate(shown or ([{"content": ""}] if delta.logprobs else [])):
            logprobs = dumps(self._content_logprobs(delta.logprobs or ())) if self._logprobs and i == 0 else "null"
            yield f'{head},"delta":{dumps(piece)},"logprobs":{logprobs},"finish_reason":null{tail}'
        if reason is not None:
            end = f'"finish_reason":{dumps(reason)},"stop_reason":{dumps(delta.stop_reason)}'
            yield f'{head},"delta":{{}},"logprobs":null,{end}{tail}'

    def usage_event(self, usage: dict[str, Any]) -> str:
        return dumps({**self._chunk, "choices": [], "usage": usage})

    def answer(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "object": "chat.completion",
            **self._common,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, choice: Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        if self._reading is not None:
            reader = self._reading.reader()
            reader.push(choice.text, last=True)
            message, reason = reader.message(), self._reading.finish_reason(reason, bool(reader.calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self._content_logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }

    def _content_logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {"content": chat_entries(self._labels, list(logprobs)), "refusal": None}
