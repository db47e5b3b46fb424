"""Tool calls found in text: each format, text around them, markup that is none, and any cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.text.json_call import CallArguments, CallStart, Event, Text
from kvist.text.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from kvist.text.tool_parser import ToolParser

NAMES = frozenset({"f", "g"})
Shown = list[tuple[str, str]]


def join(events: list[Event]) -> Shown:
    """Text and calls in order: ("", text) or (name, arguments)."""
    shown: Shown = []
    for event in events:
        match event:
            case Text(text):
                if shown and shown[-1][0] == "":
                    shown[-1] = ("", shown[-1][1] + text)
                else:
                    shown.append(("", text))
            case CallStart(index, name):
                assert index == sum(name != "" for name, _ in shown)
                shown.append((name, ""))
            case CallArguments(index, text):
                assert index == sum(name != "" for name, _ in shown) - 1
                shown[-1] = (shown[-1][0], shown[-1][1] + text)
    return shown


def read(style: ToolFormat, pieces: list[str], *, single: bool = False) -> Shown:
    parser = ToolParser(style.markup, NAMES, single=single)
    events = [event for piece in pieces for event in parser.push(piece)]
    return join(events + parser.finish())


CASES: list[tuple[ToolFormat, str, Shown]] = [
    (HERMES, "", []),
    (HERMES, " a <b> \n", [("", " a <b> \n")]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
    (HERMES, 'Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', [("", "Sure."), ("f", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}", "b": [1, {"c": "\\"}"}]}}</tool_call>',
        [("f", '{"a": "</tool_call>}", "b": [1, {"c": "\\"}"}]}')],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"x": 1}, "id": 7, "name": "g"}</tool_call>\n<tool_call>{"name":"f"}</tool_call> done',
        [("g", '{"x": 1}'), ("f", "{}"), ("", "done")],
    ),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (HERMES, "<tool_call> is a tag", [("", "<tool_call> is a tag")]),
    (HERMES, '<tool_call>{"nam": "f"}</tool_call> hm', [("", '<tool_call>{"nam": "f"}</tool_call> hm')]),
    (HERMES, 'cut <tool_call>{"name": "f", "arguments": {"a', [("", "cut"), ("f", '{"a')]),
    (HERMES, '<tool_call>{"name": }</tool_call> hm', [("", '<tool_call>{"name": }</tool_call> hm')]),
    (HERMES, '<tool_call>{"name":"f","arguments": }</tool_call> hm', [("f", "{}"), ("", "hm")]),
    (HERMES, 'cut <tool_call>\n{"na', [("", "cut")]),
    (HERMES, '<tool_call>[{"name":"f","arguments":{}}, {"name":"g"}]</tool_call> ok', [("f", "{}"), ("g", "{}"), ("", "ok")]),
    (HERMES, "<tool_call>[1, 2]", [("", "<tool_call>[1, 2]")]),
    (HERMES, "cut <tool_ca", [("", "cut <tool_ca")]),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool', [("f", "{}")]),
    (HERMES, '<tool_call>{"name":"new","arguments":{}}</tool_call>', [("new", "{}")]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": [1]}'), ("g", "{}")],
    ),
    (MISTRAL, 'Hm [TOOL_CALLS]{"name": "f", "arguments": {}}', [("", "Hm"), ("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": " } "}[TOOL_CALLS]g{"b": {}}', [("f", '{"a": " } "}'), ("g", '{"b": {}}')]),
    (MISTRAL, "[TOOL_CALLS]f[CALL_ID]123[ARGS]{}", [("f", "{}")]),
    (MISTRAL, "[TOOL_CALLS] no, {that} is text", [("", "[TOOL_CALLS] no, {that} is text")]),
    (MISTRAL, "ends in [TOOL_CALLS", [("", "ends in [TOOL_CALLS")]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (
        LLAMA3,
        ' <|python_tag|>{"name":"f","parameters":{}}; {"name": "g", "parameters": {"b": 2}}',
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    (LLAMA3, '{"name": "other", "parameters": {}} ok', [("", '{"name": "other", "parameters": {}} ok')]),
    (LLAMA3, '\n{"answer": 42}', [("", '\n{"answer": 42}')]),
    (LLAMA3, 'See {"name": "f", "parameters": {}}', [("", 'See {"name": "f", "parameters": {}}')]),
    (LLAMA3, "  ", [("", "  ")]),
]


@pytest.mark.parametrize(("style", "text", "shown"), CASES)
def test_calls_and_text(style: ToolFormat, text: str, shown: Shown) -> None:
    assert read(style, [text]) == shown
    for size in (1, 2, 3, 7):
        assert read(style, [text[i : i + size] for i in range(0, len(text), size)]) == shown


def test_text_before_a_call_and_arguments_do_not_wait() -> None:
    parser = ToolParser(HERMES.markup, NAMES)
    assert parser.push("Let me see") == [Text("Let me see")]
    assert parser.push(".\n<tool_") == [Text(".")]
    assert parser.push('call>{"name": "f"') == [CallStart(0, "f")]
    assert parser.push(', "arguments": {"a": ') == [CallArguments(0, '{"a": ')]
    assert parser.push("12") == [CallArguments(0, "12")]
    assert parser.push("}}") == [CallArguments(0, "}")]
    assert parser.push("</tool_call>") == parser.finish() == []


def test_single_keeps_the_first_call() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{"a":1}}</tool_call> end'
    assert read(HERMES, [text], single=True) == [("f", "{}"), ("", "end")]


def written(style: ToolFormat, calls: list[tuple[str, Any]]) -> str:
    objects = [json.dumps({"name": name, style.arguments: arguments}) for name, arguments in calls]
    match style.name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]" if objects else ""
    return "; ".join(objects)


ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.recursive(st.one_of(st.text(max_size=6), st.integers(), st.none()), st.lists, max_leaves=4)
)
LEAD = st.text(st.sampled_from('<tolc_a>{}[]TOLCAS \n"pyhn|g;'), max_size=14)


@given(
    style=st.sampled_from([HERMES, MISTRAL, LLAMA3]),
    lead=LEAD,
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS.filter(lambda value: len(value) < 3)), max_size=3),
    cuts=st.lists(st.integers(1, 9), max_size=40),
)
def test_any_calls_come_back_however_they_are_cut(
    style: ToolFormat, lead: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    text = written(style, calls) if style is LLAMA3 else lead + written(style, calls)
    pieces, at = [], 0
    for size in cuts:
        pieces.append(text[at : at + size])
        at += size
    shown = read(style, [*pieces, text[at:]])
    assert [(name, json.loads(arguments)) for name, arguments in shown if name] == calls
    if not calls:
        assert shown == ([("", text)] if text else [])
    elif style is not LLAMA3:
        assert "".join(text for name, text in shown if not name) == lead.rstrip(" \n")


def test_long_arguments_come_whole_in_one_piece_and_in_many() -> None:
    """Each character is looked at, and none of those before it is copied for it."""
    arguments = json.dumps({"a": "x" * 300_000})
    text = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
    for size in (1000, len(text)):
        assert read(HERMES, [text[i : i + size] for i in range(0, len(text), size)]) == [("f", arguments)]


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        (LLAMA3, "{}x", [("", "{}x")]),
        (HERMES, "a{}b", [("", "a{}b")]),
        (HERMES, '<tool_call>{}{{"name": "f"}}', [("f", "{{}}")]),
        (HERMES, '<tool_call>{{"name": "f"}}{}</tool_call>{}', [("f", "{{}}")]),
        (HERMES, '<tool_call>{{"arguments": {{"a":{}1}}, "name": "f"}}', [("f", '{{"a":{}1}}')]),
        (LLAMA3, '{{"b": "{}"}}', [("", '{{"b": "{}"}}')]),
    ],
)
def test_white_space_without_end_is_looked_at_once(style: ToolFormat, text: str, expected: list[tuple[str, str]]) -> None:
    """Looking again at all of it for each piece would take half a minute."""
    space = " \n\t" * 40_000
    whole = text.format(space, space)
    shown = read(style, [whole[i : i + 3] for i in range(0, len(whole), 3)])
    assert shown == [(name, said.format(space)) for name, said in expected]
