"""JSON of large bodies, parsed piece by piece: the standard parser holds Python's lock from a text's begin to its end, and with it
everybody's streams; 200,000 numbers or 100,000 members take it 20 to 100 ms.

What it gives and refuses is what `json.loads` gives and refuses, but that no object may name a member twice: one of both would be
ignored. Each piece is the standard parser's: a value that ends within a
window, a run of numbers, or one string. Knows no requests and no limits.
"""

from __future__ import annotations

import json
import re
from typing import Any

WINDOW = 4096
"""Characters that are parsed at once, where no string is longer."""


class DoubledNameError(ValueError):
    """An object names a member twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these members. Raises DoubledNameError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise DoubledNameError(name)
            names.add(name)
    return found


_scan = json.JSONDecoder(object_pairs_hook=members).raw_decode
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*")


def load(text: str) -> Any:
    """As `json.loads`. Raises JSONDecodeError and DoubledNameError. It calls itself once a level: whoever calls bounds them."""
    value, end = _value(text, _skip(text, 0))
    if end != len(text) and (end := _skip(text, end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def _value(text: str, position: int) -> tuple[Any, int]:
    """The value that begins here, and where it ends."""
    try:
        window = text[position : position + WINDOW]
        value, size = _scan(window, 0)
        if size + len("e+") < len(window) or position + len(window) == len(text):  # otherwise a number may go on
            return value, position + size
    except json.JSONDecodeError:
        pass  # cut off, or wrong: what follows tells
    match text[position : position + 1]:
        case "[":
            return _array(text, position)
        case "{":
            return _object(text, position)
    return _scan(text, position)  # a string or a number, which may be long


def _array(text: str, position: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    position = _skip(text, position + 1)
    if text[position : position + 1] == "]":
        return values, position + 1
    while True:
        run = _NUMBERS.match(text, position, position + WINDOW)
        numbers = "" if run is None else run.group().rpartition(",")[0]
        if numbers.strip():
            values += _run(text, position, numbers)
            position = _skip(text, position + len(numbers) + 1)
        value, position = _value(text, position)
        values.append(value)
        position, more = _next(text, position, "]")
        if not more:
            return values, position


def _next(text: str, position: int, closes: str) -> tuple[int, bool]:
    """Behind an item: where the next begins, or where the container ends, and whether there is a next."""
    position = _skip(text, position)
    mark = text[position : position + 1]
    if mark == closes:
        return position + 1, False
    if mark != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    return _skip(text, position + 1), True


def _run(text: str, position: int, numbers: str) -> list[Any]:
    try:
        found: list[Any] = json.loads(f"[{numbers}]")
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, text, position + error.pos - 1) from None
    return found


def _object(text: str, position: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    position = _skip(text, position + 1)
    if text[position : position + 1] == "}":
        return values, position + 1
    while True:
        if text[position : position + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
        name, position = _scan(text, position)
        if name in values:
            raise DoubledNameError(name)
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, position)
        values[name], position = _value(text, _skip(text, position + 1))
        position, more = _next(text, position, "}")
        if not more:
            return values, position
