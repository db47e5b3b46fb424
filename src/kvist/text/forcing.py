"""Text that a grammar leaves no choice about: llguidance puts it into tokens ahead of each mask, as far as it is fixed.

That gives a model the tokens it would have taken, and costs 0.3 us a character, at each token again, for everybody: of a value of
200,000 characters 60 ms. So a grammar that may fix much is asked to force nothing: its masks then allow each token that the text
goes on with, and cost the same whatever its length. The text is the same either way.

Knows llguidance's Lark, its lists of grammars and JSON schemas as far as their size goes, and no tokens. Invariant: what is counted
is never less than what a terminal fixes; text fixed by rules is bounded by the parser's own limit. Work is in proportion to the
grammar's length, whatever it holds: an expression that looks through it keeps Python's lock until its end.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_FIXED = 8 * 1024
"""Characters: 2.5 ms a mask."""
NO_FORCING = '%llguidance {"no_forcing": true}\n'

_DEFINITION = re.compile(r"^[ \t]*+[?!]?([A-Za-z_]\w*+)[^:\n\"/|]*+:(?!:)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_REPEAT = re.compile(r"[{~]\s*(\d{1,9})")
_SPACE = re.compile(r"\s*+")
_NOTES = ("description", "title", "$comment")
_scan = json.JSONDecoder().raw_decode


def bound_forcing(source: str) -> str:
    """The same grammar, where need be one that forces nothing."""
    whole = json.loads(source) if source.startswith("{") else {"grammars": [{"lark_grammar": source}]}
    try:
        if sum(map(_fixed, whole["grammars"])) <= MAX_FIXED:
            return source
    except RecursionError:
        pass  # nested that deep, it is long
    first, *others = whole["grammars"]
    lark = first.get("lark_grammar") or f"start: %json {json.dumps(first.get('json_schema'))}"
    first = {**first, "json_schema": None, "lark_grammar": NO_FORCING + lark}
    return json.dumps({**whole, "grammars": [first, *others]})


def _fixed(grammar: dict[str, Any]) -> int:
    """At most so many characters are fixed by one piece of the grammar."""
    return _in_schema(grammar.get("json_schema")) + _in_lark(grammar.get("lark_grammar") or "")


def _in_schema(schema: Any, *, listed: bool = False) -> int:
    """Of names, listed values and patterns; what only explains is left out."""
    match schema:
        case str():
            return len(schema) if listed else _repeated(schema)
        case list():
            return sum(_in_schema(item, listed=listed) for item in schema)
        case dict():
            total = sum(map(len, schema))
            for key, value in schema.items():
                if listed or key not in _NOTES or not isinstance(value, str):
                    total += _in_schema(value, listed=listed or key in ("enum", "const"))
            return total
    return 0


def _in_lark(text: str) -> int:
    """Of the rules under `start`, with all that they name put in their places."""
    total, rest, begin = 0, [], 0
    while (found := text.find("%json", begin)) >= 0:
        rest.append(text[begin:found])
        space = _SPACE.match(text, found + len("%json"))
        assert space is not None
        try:
            schema, begin = _scan(text, space.end())
        except ValueError:
            return MAX_FIXED + 1  # a mistake, which llguidance will name, or in a literal or a comment
        total += _in_schema(schema)
    text = "".join([*rest, text[begin:]])
    places = list(_DEFINITION.finditer(text))
    ends = [*(place.start() for place in places), len(text)][1:]
    bodies = {place[1]: text[place.end() : end] for place, end in zip(places, ends, strict=True)}
    if "start" not in bodies:
        return total + _repeated(text)
    return total + _expanded("start", bodies, {})


def _expanded(name: str, bodies: dict[str, str], known: dict[str, int]) -> int:
    """A rule that names itself counts once; `known` has what was counted before, as far as it matters."""
    known[name] = 0
    body = bodies[name]
    repeats = _repeats(body)
    total = len(body) * repeats
    for inner in _NAME.findall(body):
        if inner in bodies:
            size = known[inner] if inner in known else _expanded(inner, bodies, known)
            total += size * repeats
    known[name] = min(total, MAX_FIXED + 1)
    return known[name]


def _repeats(text: str) -> int:
    """All repetitions as if one stood in the other, counted until they are too many."""
    total = 1
    for found in _REPEAT.finditer(text):
        total *= max(1, int(found[1]))
        if total > MAX_FIXED:
            break
    return total


def _repeated(text: str) -> int:
    return len(text) * _repeats(text)
