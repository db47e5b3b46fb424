"""Which grammars may fix so much text that nothing of it is forced, and that these accept what they accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_vocabularies import byte_level, make

from kvist.request import StructuredOutputsParams
from kvist.text.answer_form import answer_form
from kvist.text.forcing import MAX_FIXED, NO_FORCING, bound_forcing
from kvist.text.grammar import GrammarCompiler, grammar_source

TOKENIZER = make(byte_level())
IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_token_ids}
LONG = "the quick brown fox " * (MAX_FIXED // 20 + 1)
LEFT, RIGHT = "left " + LONG, "right " + LONG


def source_of(form: dict[str, Any]) -> str:
    return grammar_source(StructuredOutputsParams.of(form))


def larks(source: str) -> list[str]:
    return [one.get("lark_grammar") or "" for one in json.loads(source)["grammars"]] if source.startswith("{") else [source]


def doubled(times: int) -> str:
    return "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(times)), f'A{times}: "abcd"'])


BOUND: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": [LEFT, RIGHT]}, RIGHT),
    "listed values": ({"json": {"enum": [LEFT, RIGHT]}}, json.dumps(RIGHT)),
    "a listed value with notes": ({"json": {"const": {"description": LONG}}}, json.dumps({"description": LONG})),
    "a property's name": (
        {"json": {"properties": {LONG: {"const": 1}}, "required": [LONG], "type": "object"}},
        json.dumps({LONG: 1}),
    ),
    "regex": ({"regex": f"[ab]{LONG}"}, "b" + LONG),
    "repeated": ({"regex": f"(ab){{{MAX_FIXED}}}"}, "ab" * MAX_FIXED),
    "literal": ({"grammar": f"start: X\nX: {json.dumps(LONG)}"}, LONG),
    "doubled": ({"grammar": doubled(12)}, "abcd" * 4096),
    "a schema in a grammar": ({"grammar": f"start: %json {json.dumps({'const': LONG})}"}, json.dumps(LONG)),
    "a list of grammars": ({"grammar": json.dumps({"grammars": [{"json_schema": {"const": LONG}}]})}, json.dumps(LONG)),
}


@pytest.mark.parametrize("name", BOUND)
def test_much_fixed_text_is_not_forced_and_is_accepted_as_before(name: str) -> None:
    form, text = BOUND[name]
    assert larks(bound_forcing(source_of(form)))[0].startswith(NO_FORCING)
    grammar = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [1]).compile(StructuredOutputsParams.of(form))
    matcher, ids = grammar.new_matcher(), [IDS[bytes([byte])] for byte in text.encode()]
    for token_id in ids[:40]:
        assert matcher.compute_bitmask()[token_id // 8] >> token_id % 8 & 1
        assert matcher.consume_token(token_id)
    assert matcher.try_consume_tokens(ids[40:]) == len(ids) - 40
    assert matcher.is_accepting()


FORCED: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["left", "right"]},
    "a schema with long notes": {"json": {"type": "object", "description": LONG, "properties": {"a": {"title": LONG}}}},
    "regex": {"regex": "[0-9]{4}-[0-9]{2}"},
    "grammar": {"grammar": 'start: "a" start | "b"'},
}


@pytest.mark.parametrize("name", FORCED)
def test_what_fixes_little_is_left_as_it_is(name: str) -> None:
    source = source_of(FORCED[name])
    assert bound_forcing(source) == source


def test_the_parts_of_an_answer_count_together_and_are_bound_as_one() -> None:
    half = "x" * (MAX_FIXED // 2)
    form = answer_form(StructuredOutputsParams(choice=[half]), f"calls: {json.dumps(half)}", "opened", lambda text: None)
    assert form is not None
    first, second = larks(bound_forcing(grammar_source(form)))
    assert first.startswith(NO_FORCING)
    assert not second.startswith(NO_FORCING), "one for all"


def test_two_choices_of_200_000_characters_are_followed() -> None:
    """Forced, this one was given up on after a few tokens."""
    choice = [("left " * 40_000)[:200_000], ("right " * 40_000)[:200_000]]
    matcher = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [1]).compile(StructuredOutputsParams(choice=choice)).new_matcher()
    for byte in choice[0][:2000].encode():
        assert matcher.compute_bitmask()[IDS[bytes([byte])] // 8]
        assert matcher.consume_token(IDS[bytes([byte])])
    assert not matcher.is_error()


HUGE = 500_000
NAUGHTY = {
    "one long line": 'start: "x"\n' + "a" * HUGE,
    "many names in one rule": f'start: {"a " * (HUGE // 2)}\na: "x"\n',
    "many repetitions": 'start: "x"' + "{999999999}" * (HUGE // 11),
    "many schemas that are none": 'start: "x"\n' + "%json {" * (HUGE // 7),
    "many empty lines": 'start: "x"' + "\n" * HUGE,
}


@pytest.mark.parametrize("name", NAUGHTY)
def test_what_is_huge_is_looked_through_in_proportion_to_its_size(name: str) -> None:
    """In proportion to its square each of these takes minutes, and all of Python waits."""
    source = grammar_source(StructuredOutputsParams(grammar=NAUGHTY[name]))
    assert larks(bound_forcing(source))[0].startswith(NO_FORCING)


def test_empty_lines_before_a_grammar_are_passed_over() -> None:
    """As above, where the kind of a grammar is looked for."""
    assert grammar_source(StructuredOutputsParams(grammar="\n" * HUGE + 'start: "x"')).endswith('start: "x"')
    assert 'start: "x"' in grammar_source(StructuredOutputsParams(grammar="\n" * HUGE + 'root ::= "x"'))


def test_what_looks_like_a_schema_in_a_literal_or_a_comment_is_accepted_as_before() -> None:
    form = StructuredOutputsParams(grammar='// %json none\nstart: "%json x" "y"')
    matcher = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [1]).compile(form).new_matcher()
    assert matcher.try_consume_tokens([IDS[bytes([byte])] for byte in b"%json xy"]) == 8
    assert matcher.is_accepting()
