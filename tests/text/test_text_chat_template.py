"""Chat templates: what they render, what of a client's messages they are given, and how every mistake is answered."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvist.errors import InvalidRequestError
from kvist.text.chat_template import ChatTemplate, select_template
from kvist.text.info import TokenizerInfo

INFO = TokenizerInfo(10, "byte_level", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
PLAIN = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<{{ message.role }}>{{ message['content'] + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "<assistant>{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def show(expression: str, **variables: Any) -> str:
    return ChatTemplate("{{ " + expression + " }}", INFO).render(HI, **variables)


def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    template = ChatTemplate(PLAIN, INFO)
    assert template.render(HI) == "<s><user>Hi</s>\n<assistant>"
    assert template.render(HI, add_generation_prompt=False) == "<s><user>Hi</s>\n"


def test_continuing_the_final_message() -> None:
    template = ChatTemplate(PLAIN, INFO)
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    assert template.render(messages, continue_final_message=True) == "<s><user>Hi</s>\n<assistant>Well, "
    trimming = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trimming.render([HI[0], {"role": "assistant", "content": " a "}], continue_final_message=True) == "[Hi][a "
    assert template.render([*HI, {"role": "assistant", "content": ""}], continue_final_message=True).endswith("<assistant>")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        template.render(messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(messages, continue_final_message=True)


def test_content_as_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    assert ChatTemplate("[{{ messages[0].content }}]").render([{"role": "user", "content": []}]) == "[]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "a", {"text": "a"}, 7])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content\[0\] is of type") as error:
        ChatTemplate(PLAIN, INFO).render([*HI, {"role": "user", "content": [part]}])
    assert error.value.param == "messages"


def test_tool_calls_without_content_and_arguments_as_an_object() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content + '|' }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = '|[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "<é>"}}}]'
    assert template.render(messages) == shown
    assert call["function"] == {"name": "f", "arguments": '{"x": "<é>"}'}


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "[" * 100_000, 5])
def test_malformed_tool_call_arguments_are_the_clients_mistake(arguments: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be"):
        ChatTemplate(PLAIN, INFO).render(messages)


def test_fields_that_say_nothing_are_not_there() -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }} {{ messages[0].name is defined }}")
    assert template.render([{"role": "user", "content": "", "tool_calls": None, "name": None}]) == "False False"
    assert template.render([{"role": "user", "content": "", "tool_calls": [], "name": "n"}]) == "False True"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": ""}]
    assert ChatTemplate("{{ messages[0].role }}").render(messages) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render(messages) == "developer"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        ([7], r"messages\[0\] must be an object"),
        ([{"role": "wizard", "content": ""}], r"messages\[0\]\.role must be one of .*, not 'wizard'"),
        ([{"content": ""}], "not None"),
        ([{"role": [], "content": ""}], "role must be one of"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 7}], "must be a string or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "must be a string or a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "must have a function with a name"),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": {"function": {}}}], r"messages\[0\]\.tool_calls must be a list"),
    ],
)
def test_messages_that_are_none(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        ChatTemplate(PLAIN, INFO).render(messages)
    assert error.value.param == "messages"


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_refusal_of_the_template_reaches_the_client() -> None:
    assert ChatTemplate(ALTERNATING).render(HI) == "Hi"
    with pytest.raises(InvalidRequestError, match="refused the messages: Roles must alternate user/assistant"):
        ChatTemplate(ALTERNATING).render(HI * 2)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 'a' * 1000000000 }}", "repeated beyond"),
        ("{{ 1000000000 * [1] }}", "repeated beyond"),
        ("{{ 9 ** 999999999 }}", "exponent"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "renders more than"),
        ("{% for m in messages %}", "does not compile"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
    ],
)
def test_templates_that_fail_or_run_away(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate(template).render(HI)


def test_deep_messages_are_the_clients_mistake() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        ChatTemplate("{{ messages[0].x | tojson }}").render([{"role": "user", "content": "", "x": deep}])


def test_no_template() -> None:
    for source in (None, "", {}):
        with pytest.raises(InvalidRequestError, match="has no chat template"):
            ChatTemplate(source).render(HI)


def test_named_templates() -> None:
    assert select_template({"tool_use": "t", "default": "d"}) == "d"
    assert select_template([{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]) == "d"
    assert select_template({"chat": "c"}) == "c"
    assert select_template({"a": "1", "b": "2"}) is None


def test_variables_of_the_template() -> None:
    assert show("enable_thinking", enable_thinking=False) == "False"
    assert show("tools", tools=[]) == "None"
    assert show("tools[0].function.name", tools=[{"type": "function", "function": {"name": "f"}}]) == "f"
    with pytest.raises(InvalidRequestError, match="may not set messages"):
        show("1", messages=[])


def test_what_transformers_templates_rely_on() -> None:
    assert show("{'a': '<é>', 'b': [1]} | tojson") == '{"a": "<é>", "b": [1]}'
    assert show("[1] | tojson(indent=1)") == "[\n 1\n]"
    assert len(show("strftime_now('%Y-%m-%d')")) == 10
    template = ChatTemplate(
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}!"
    )
    assert template.render(HI) == "Hi!"


def test_jinja_is_imported_for_the_first_render_only() -> None:
    code = (
        "import sys; from kvist.text.chat_template import ChatTemplate as T; t = T('x');"
        "assert 'jinja2' not in sys.modules; t.render([{'role': 'user', 'content': ''}]); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_compiled_template_is_kept() -> None:
    template = ChatTemplate("x")
    template.render(HI)
    compiled = template._compiled
    template.render(HI)
    assert template._compiled is compiled is not None
