"""Formats of tool calls: found in templates, told in prompts, and kept to by grammars that the parsers read back."""

from __future__ import annotations

from typing import Any

import pytest
from text_vocabularies import byte_level, make

from kvist.errors import InvalidRequestError
from kvist.request import StructuredOutputsParams
from kvist.text.answer_form import Thoughts, answer_form
from kvist.text.chat_template import ChatTemplate
from kvist.text.grammar import GrammarCompiler
from kvist.text.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    NO_ARGUMENTS,
    Tool,
    ToolFormat,
    detect_format,
    find_format,
)  # fmt: skip
from kvist.text.tool_prompt import describe_tools, spell_out_calls

TOKENIZER = make(byte_level())
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [1])
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [Tool("weather", CITY), Tool('say"it', NO_ARGUMENTS)]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
SAY = '{"name": "say\\"it", "arguments": {}}'
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools><tool_call>{% endif %}",
    "llama3_json": '<|start_header_id|>{% if tools %}{"name": function name, "parameters": ...}{% endif %}{{ \'"parameters": \' }}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]",
}


def plain(text: str) -> int | None:
    return None


def special(text: str) -> int | None:
    """Marks that are special tokens of the vocabulary: here <|im_end|> stands for any of them."""
    return 2 if text in ("[TOOL_CALLS]", "<tool_call>", "</think>") else None


def fits(form: StructuredOutputsParams | None, text: str, marks: Any = plain) -> bool:
    """Whether an answer may be this text and end there; a mark that is a special token counts as one token."""
    assert form is not None
    matcher = COMPILER.compile(form).new_matcher()
    for mark in ("[TOOL_CALLS]", "<tool_call>", "</think>"):
        text = text.replace(mark, "\0") if marks(mark) is not None else text
    ids = [2 if byte == 0 else 4 + byte for byte in text.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def bound(style: ToolFormat, text: str, marks: Any, *, many: bool = True, free: bool = False) -> bool:
    return fits(answer_form(None, style.grammar(TOOLS, marks, many=many, free=free), "none", marks), text, marks)


@pytest.mark.parametrize("marks", [plain, special])
def test_bound_answers_are_calls(marks: Any) -> None:
    one, other = f"<tool_call>\n{ROME}\n</tool_call>", f"<tool_call>\n{SAY}\n</tool_call>"
    assert bound(HERMES, one, marks, many=False)
    assert bound(HERMES, f"{one}\n{other}", marks)
    assert not bound(HERMES, f"{one}\n{other}", marks, many=False)
    assert bound(MISTRAL, f"[TOOL_CALLS][{ROME}, {SAY}]", marks)
    assert not bound(MISTRAL, f"[TOOL_CALLS][{ROME}, {SAY}]", marks, many=False)
    assert bound(MISTRAL_ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "x"}', marks)
    assert bound(LLAMA3, ROME.replace("arguments", "parameters"), marks)
    for style in (HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3):
        assert not bound(style, "", marks)
        assert not bound(style, "Rome", marks)
        assert not bound(style, one.replace("city", "town"), marks)


def test_keywords_that_cannot_be_enforced_are_refused_for_strict_tools_alone() -> None:
    schema = {
        "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "string", "format": "new"}},
        "if": {},
        "oneOf": [{}, {}],
    }
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1], "b": "x"}}\n</tool_call>'
    loose, strict = (
        answer_form(None, HERMES.grammar([Tool("f", schema, strict=s)], plain, many=False, free=False), "none", plain)
        for s in (False, True)
    )
    assert fits(loose, text)
    with pytest.raises(InvalidRequestError, match="Unimplemented"):
        fits(strict, text)


@pytest.mark.parametrize("marks", [plain, special])
def test_free_answers_are_text_and_calls_that_fit(marks: Any) -> None:
    one = f"<tool_call>\n{ROME}\n</tool_call>"
    for text in ("", "just < text", f"Sure: {one}\n{one} done"):
        assert bound(HERMES, text, marks, free=True)
    assert not bound(HERMES, one.replace("city", "town"), marks, free=True)
    assert bound(MISTRAL, f"Hm. [TOOL_CALLS][{ROME}]", marks, free=True)
    assert not bound(MISTRAL, "[TOOL_CALLS][]", marks, free=True)
    assert bound(LLAMA3, ROME.replace("arguments", "parameters"), marks, free=True)
    assert bound(LLAMA3, "text {", marks, free=True)
    assert not bound(LLAMA3, '{"name": "other"}', marks, free=True)


@pytest.mark.parametrize("marks", [plain, special])
@pytest.mark.parametrize("thoughts", ["opened", "possible"])
def test_forms_come_behind_thoughts(marks: Any, thoughts: Thoughts) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    opening = "" if thoughts == "opened" else "<think>"
    calls = HERMES.grammar(TOOLS, marks, many=False, free=False)
    call = f"<tool_call>\n{ROME}\n</tool_call>"
    only_form, only_calls = answer_form(form, None, thoughts, marks), answer_form(None, calls, thoughts, marks)
    both = answer_form(form, calls, thoughts, marks)
    assert fits(only_form, f"{opening}hm, no, yes</think>\n\nyes", marks)
    assert fits(only_calls, f"{opening}hm</think>{call}", marks)
    assert fits(both, f"{opening}</think>\n{call}", marks)
    assert fits(both, f"{opening}</think>no", marks)
    assert not fits(both, f"{opening}</think>maybe", marks)
    assert fits(only_form, "yes", marks) == (thoughts == "possible")


def test_a_form_alone_stays_what_it_is() -> None:
    form = StructuredOutputsParams(regex="a")
    assert answer_form(form, None, "none", plain) is form
    assert answer_form(None, None, "opened", plain) is None
    with pytest.raises(InvalidRequestError, match="nope"):
        COMPILER.compile(answer_form(StructuredOutputsParams(json={"type": "nope"}), None, "opened", plain) or form)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_their_format(name: str) -> None:
    found = detect_format(TEMPLATES[name])
    assert found is not None
    assert found.name == name
    assert find_format(name, None).name == name


def test_templates_that_tell_none() -> None:
    assert detect_format(None) is None
    assert detect_format("{{ messages }}") is None
    assert detect_format("{{ tools }} <tool_call><function=name>") is None
    assert detect_format("{{ tools }} <|call|>") is None
    assert detect_format(f"{TEMPLATES['mistral']}[ARGS]") is MISTRAL_ARGS
    assert find_format("mistral", f"{TEMPLATES['mistral']}[ARGS]") is MISTRAL_ARGS


def test_a_template_without_tools_refuses_them() -> None:
    with pytest.raises(InvalidRequestError, match="no place for tools") as caught:
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": "x"}], tools=[{"type": "function"}])
    assert caught.value.param == "tools"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "1"},
    {"role": "tool", "content": "2", "tool_call_id": "2"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
]


def test_calls_and_answers_are_written_out_for_templates_that_know_none() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    spelled = spell_out_calls(TALK)
    assert [message["role"] for message in spelled] == ["user", "assistant", "user", "assistant", "user"]
    assert spelled[1]["content"] == f"{call}\n{call}"
    assert spelled[2]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert spelled[3]["content"] == f"Hm.\n{call}"
    assert "tool_calls" in TALK[1], "what was given is left alone"
    text = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}").render(TALK)
    assert f"assistant:Hm.\n{call};user:<tool_response>\n3" in text
    kept = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.tool_calls }};{% endfor %}").render(TALK)
    assert kept.endswith("tool;")


def test_tools_are_told_in_the_system_message() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    first, user = describe_tools(TALK[:1], [tool])
    assert first["role"] == "system"
    assert '{"type": "function", "function": {"name": "f"}}' in first["content"]
    assert user is TALK[0]
    (joined, _) = describe_tools([{"role": "system", "content": "Be kind."}, TALK[0]], [tool])
    assert joined["content"] == f"Be kind.\n\n{first['content']}"
