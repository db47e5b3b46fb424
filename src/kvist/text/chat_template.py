"""Messages to the text that a chat model was trained on, by the model's own Jinja template.

`ChatTemplate.render` checks and evens out the messages (the OpenAI schema in, what templates expect out), then renders. Whatever
is wrong with the messages, or that the template refuses, is the client's mistake and an InvalidRequestError. It knows no token
ids: the rendered text holds special tokens by name, BOS included where the template writes it (Tokenizer.encode_chat). jinja2 is
imported at the first render; the compiled template is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvist.errors import InvalidRequestError
from kvist.text.info import TokenizerInfo
from kvist.text.tool_prompt import spell_out_calls

if TYPE_CHECKING:
    from jinja2 import Template

TemplateSource = str | Mapping[str, str] | Sequence[Mapping[str, str]] | None
"""A template, several by name (as a mapping, or as tokenizer_config.json lists them), or none."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Stands where the final message ends, to cut there. Private-use characters, which no template treats in a special way.
_CUT = "\ue0f0kvist-cut\ue0f1"
_RESERVED = frozenset(["messages", "tools", "add_generation_prompt", "continue_final_message"])


class ChatTemplate:
    """One model's chat template. `info` has the special tokens that it may call by name."""

    def __init__(self, source: TemplateSource, info: TokenizerInfo | None = None) -> None:
        self.source = select_template(source)
        self._special_tokens = dict(info.special_tokens) if info else {}
        self._compiled: Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        `add_generation_prompt` (the default, unless the final message is to be continued) opens the assistant's turn;
        `continue_final_message` leaves the last message open instead, so that the model goes on with it.
        `chat_template_kwargs` are the template's own variables (enable_thinking ...).

        Raises InvalidRequestError: no template, messages that are none, content other than text, a template that refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them.",
                param="continue_final_message",
            )
        if taken := sorted(_RESERVED.intersection(chat_template_kwargs)):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {taken[0]}; it is a field of the request.", param="chat_template_kwargs"
            )
        template = self._template()
        plain = [_plain_message(message, i) for i, message in enumerate(_checked(messages))]
        if "developer" not in (self.source or ""):
            for message in plain:
                # The newer name of the same role; templates from before it would write it out, untrained.
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if tools and not knows_tools(self.source):
            raise InvalidRequestError(
                "The model's chat template has no place for tools; leave tools out, or use a model that was trained to call them.",
                param="tools",
            )
        if not knows_calls(self.source):
            plain = spell_out_calls(plain)
        if continue_final_message:
            plain[-1]["content"] += _CUT
        variables = {
            **self._special_tokens,
            **chat_template_kwargs,
            "messages": plain,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        }
        text = _render(template, variables)
        return _cut(text) if continue_final_message else text

    def _template(self) -> Template:
        if self._compiled is None:
            if self.source is None:
                raise InvalidRequestError(
                    "The model has no chat template; use the completions endpoint, or a model that is made for chat.",
                    param="messages",
                )
            from jinja2.exceptions import TemplateError

            from kvist.text.sandbox import make_environment

            try:
                self._compiled = make_environment().from_string(self.source)
            except (TemplateError, RecursionError) as error:
                raise InvalidRequestError(f"The model's chat template does not compile: {error}.", param="messages") from error
        return self._compiled


def select_template(source: TemplateSource) -> str | None:
    """The template itself: of several by name, "default", or the only one."""
    if source is None or isinstance(source, str):
        return source or None
    named = source if isinstance(source, Mapping) else {entry["name"]: entry["template"] for entry in source}
    if "default" in named or len(named) != 1:
        return named.get("default")
    return next(iter(named.values()))


def knows_tools(template: str | None) -> bool:
    return template is not None and "tools" in template


def knows_calls(template: str | None) -> bool:
    """Whether a template writes out the calls of earlier turns."""
    return template is not None and "tool_calls" in template


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    from kvist.text.sandbox import MAX_TEXT

    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT:
                raise InvalidRequestError(f"The chat template renders more than {MAX_TEXT} characters.", param="messages")
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise InvalidRequestError("The messages are nested too deeply for the chat template.", param="messages") from error
    except Exception as error:  # a template is a program of its own, fed by the client: whatever it raises is about this request
        message = str(error).removesuffix(".") or type(error).__name__
        raise InvalidRequestError(f"The chat template refused the messages: {message}.", param="messages") from error
    return "".join(parts)


def _cut(text: str) -> str:
    at = text.rfind(_CUT)
    if at < 0:
        raise InvalidRequestError(
            "The chat template does not write the final message out, so it cannot be continued.", param="continue_final_message"
        )
    return text[:at].replace(_CUT, "")


def _checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of messages with role and content.", param="messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return messages


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy with content as one string, tool call arguments as objects, and without the fields that say nothing."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with role and content.", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}.", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
            raise InvalidRequestError(f"{where}.tool_calls must be a list of calls.", param="messages")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        plain.pop("tool_calls", None)
    content = message.get("content")
    if content is None:
        if "tool_calls" not in plain and "function_call" not in plain:
            raise InvalidRequestError(f"{where}.content is missing; only an assistant's tool calls go without.", param="messages")
        content = ""
    plain["content"] = content if isinstance(content, str) else _joined_parts(content, where)
    return plain


def _joined_parts(parts: Iterable[Any], where: str) -> str:
    """The text parts of a content list, one below the other."""
    if isinstance(parts, (Mapping, bytes)) or not isinstance(parts, Sequence):
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts.", param="messages")
    texts: list[str] = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{where}.content[{i}] is of type {kind!r}, but the model takes text alone; send {{'type': 'text', 'text': ...}}.",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI sends them as JSON text, templates write them out as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name.", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{where}.function.arguments must be the JSON text of an object.", param="messages")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
