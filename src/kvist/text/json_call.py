"""One tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, read while it is still being written.

`JsonCall` takes text of any cut and tells the name as soon as it is known and the arguments as they come, in the model's own
spelling. It knows no markup around the object. Invariant: the pieces of the arguments join to the JSON text of their value (or,
where a model wrote that text as a JSON string, to the string).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The `index`-th call of an answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments."""

    index: int
    text: str


Event = Text | CallStart | CallArguments


class ValueEnd:
    """Finds the end of one JSON value, character by character. It checks brackets and strings, not numbers or names."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.begun = False
        self.done = False

    def takes(self, char: str) -> bool:
        """Whether `char` belongs to the value; `done` says whether it is complete. Nothing follows once it is."""
        self.begun = True
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.done = self._depth == 0
        elif self._scalar:
            self.done = char in SPACE or char in ",}]"
            return not self.done
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 0:
            self._scalar = True
        return True


class JsonCall:
    """Reads one object. `done`: its closing brace has come. `failed`: it is no object, and a call only if its name was told."""

    def __init__(self, index: int, names: frozenset[str] | None = None) -> None:
        """Only `names` are calls, where given."""
        self._index = index
        self._names = names
        self._expects = "{"
        self._key: list[str] = []
        self._value: list[str] = []
        """Characters, for a string would be copied for each."""
        self._end = ValueEnd()
        self._early = ""
        """Arguments that came before the name."""
        self._open: list[str] = []
        """Arguments told piece by piece that have not been told yet."""
        self._names_call = self._is_arguments = False
        """What the present key says of its value."""
        self.name: str | None = None
        self.has_arguments = False
        self.done = False
        self.failed = False

    def push(self, text: str) -> tuple[list[Event], int]:
        """What `text` tells, and how many of its characters belong to the object."""
        events: list[Event] = []
        used = 0
        while used < len(text) and not (self.done or self.failed):
            used += self._step(text[used], events)
        if self._open:
            events.append(CallArguments(self._index, "".join(self._open)))
            self._open = []
        return events, used

    def _step(self, char: str, events: list[Event]) -> bool:
        if self._expects == "value":
            return self._in_value(char, events)
        if self._expects == "key":
            self._key.append(char)
            self._end.takes(char)
            if self._end.done:
                self._expects = ":"
                name = "".join(self._key)
                self._names_call = name == '"name"' and self.name is None
                self._is_arguments = name.strip('"') in ARGUMENTS and not self.has_arguments
        elif char not in SPACE:
            self._at_mark(char, events)
        return True

    def _at_mark(self, char: str, events: list[Event]) -> None:
        if self._expects == "value?" and char in ",:]}":
            self._fail()
        elif self._expects == "value?":
            self._expects, self._value, self._end = "value", [], ValueEnd()
            self._in_value(char, events)
        elif char == '"' and self._expects == "key?":
            self._expects, self._key, self._end = "key", [char], ValueEnd()
            self._end.takes(char)
        elif char == self._expects or (char == "," and self._expects == ",}"):
            self._expects = "value?" if char == ":" else "key?"
        elif char == "}" and self._expects in (",}", "key?") and self.name is not None:
            self._close(events)
        else:
            self._fail()

    def _fail(self) -> None:
        """What has told its name stays a call, without arguments where none have come."""
        self.failed = True
        if self.name is not None and not self.has_arguments:
            self._open = ["{}"]

    def _in_value(self, char: str, events: list[Event]) -> bool:
        taken = self._end.takes(char)
        if taken:
            self._value.append(char)
            if self._streams:
                self._open.append(char)
        if self._end.done:
            self._expects = ",}"
            self._end_value(events)
        return taken

    @property
    def _streams(self) -> bool:
        """Arguments are told as they come, unless the name is not known yet or they are a string that holds the JSON."""
        return self._is_arguments and self.name is not None and self._value[0] != '"'

    def _end_value(self, events: list[Event]) -> None:
        if self._names_call:
            self._tell_name(events)
        elif self._is_arguments:
            streamed = self._streams
            self.has_arguments = True
            if not streamed:
                arguments = _plain("".join(self._value))
                if self.name is None:
                    self._early = arguments
                else:
                    self._open.append(arguments)

    def _tell_name(self, events: list[Event]) -> None:
        try:
            name = json.loads("".join(self._value))
        except ValueError:
            name = None
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            self.failed = True
            return
        self.name = name
        events.append(CallStart(self._index, name))
        self._open += [self._early] if self._early else []

    def _close(self, events: list[Event]) -> None:
        self.done = True
        if not self.has_arguments:
            self._open = ["{}"]


def _plain(value: str) -> str:
    """Arguments as JSON text, also where a model wrote that text as a string."""
    if value.startswith('"'):
        try:
            inner = json.loads(value)
            return str(inner) if isinstance(json.loads(inner), dict) else value
        except ValueError:
            return value
    return value
