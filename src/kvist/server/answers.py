"""What a chat answer's text holds, and how OpenAI's messages and deltas show it: thoughts, content, tool calls.

One `AnswerReader` per choice, for answers that may hold more than content; others need none. It knows the shape of messages and
deltas, no engine and no HTTP. Invariant: the deltas of a choice join to its message.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvist.text.json_call import CallStart, Event, Text
from kvist.text.reasoning import ReasoningSplitter
from kvist.text.tool_parser import ToolParser

_DIGITS = string.digits + string.ascii_letters


@dataclass(frozen=True)
class Reading:
    """How the answers of a request are read."""

    new_splitter: Callable[[], ReasoningSplitter] | None
    new_parser: Callable[[], ToolParser] | None
    id_length: int = 24
    named: bool = False
    """A named function was asked for: OpenAI then says that the answer stopped, not that it calls."""

    def reader(self) -> AnswerReader:
        return AnswerReader(
            None if self.new_splitter is None else self.new_splitter(),
            None if self.new_parser is None else self.new_parser(),
            self.id_length,
        )

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        return "tool_calls" if has_calls and reason == "stop" and not self.named else reason


@dataclass
class AnswerReader:
    splitter: ReasoningSplitter | None
    parser: ToolParser | None
    id_length: int
    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    """Of each call. Pieces all, for a long text would be copied for each that comes."""

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text."""
        deltas: list[dict[str, Any]] = []
        thoughts, answer = ("", text) if self.splitter is None else self.splitter.push(text)
        if last and self.splitter is not None:
            more, rest = self.splitter.finish()
            thoughts, answer = thoughts + more, answer + rest
        if thoughts:
            self.thoughts.append(thoughts)
            deltas.append({"reasoning_content": thoughts, "reasoning": thoughts})
        if self.parser is None:
            events: list[Event] = [Text(answer)] if answer else []
        else:
            events = self.parser.push(answer) + (self.parser.finish() if last else [])
        return deltas + [self._delta(event) for event in events]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Text(text):
                self.content.append(text)
                return {"content": text}
            case CallStart(index, name):
                call: dict[str, Any] = {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
                self.calls.append(call)
                self.arguments.append([])
                return {"tool_calls": [{"index": index, **call}]}
        self.arguments[event.index].append(event.text)
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def message(self) -> dict[str, Any]:
        """The whole of it."""
        empty = not self.content and (self.calls or self.thoughts)
        message: dict[str, Any] = {"role": "assistant", "content": None if empty else "".join(self.content), "refusal": None}
        if self.splitter is not None:
            message["reasoning_content"] = message["reasoning"] = "".join(self.thoughts) or None
        if self.calls:
            message["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": "".join(arguments)}}
                for call, arguments in zip(self.calls, self.arguments, strict=True)
            ]
        return message

    def _new_id(self) -> str:
        """Letters and digits alone; Mistral's templates take nine of them and no more."""
        number, digits = uuid.uuid4().int, []
        for _ in range(self.id_length):
            number, digit = divmod(number, len(_DIGITS))
            digits.append(_DIGITS[digit])
        return ("" if self.id_length < 16 else "call_") + "".join(digits)
