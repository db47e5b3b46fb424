"""Tools, forms and thoughts over HTTP and with the official client, on an engine whose answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from server_fakes import FakeEngine, config, fake_of, serving

from kvist.errors import ConfigError
from kvist.request import StructuredOutputsParams
from kvist.server.abilities import Abilities
from kvist.server.options import REASONING_PARSERS, TOOL_PARSERS, ServerOptions
from kvist.text.tool_formats import FORMATS

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
HERMES = "{% if tools %}{{ tools }}<tool_call>{% endif %}{{ messages }} tool_calls"
THINKING = HERMES + "</think> enable_thinking"
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 😀"}}\n</tool_call>'


@dataclass(frozen=True)
class Template:
    source: str


@contextmanager
def scripted(script: str, template: str = HERMES, **options: Any) -> Iterator[tuple[FakeEngine, openai.OpenAI, httpx.Client]]:
    engine = FakeEngine(config=config(max_model_len=2048), chat_template=Template(template), script=script)
    with (
        serving(engine, ServerOptions(warm_up=False, **options)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield engine, api, client


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    with client.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def joined(choices: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice's deltas as one message."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for choice in choices:
        if choice["index"] != index:
            continue
        assert message["finish_reason"] is None, "nothing after the finish chunk"
        for name in ("content", "reasoning_content", "reasoning"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def test_calls_whole_and_streamed() -> None:
    with scripted(f"One moment.\n{ROME}\n{OSLO}") as (engine, _, client):
        body = {"messages": MESSAGES, "tools": [WEATHER, TIME]}
        (choice,) = client.post(CHAT, json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["role"], message["content"]) == ("assistant", "One moment.")
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Rome"}'},
            {"name": "weather", "arguments": '{"city": "Oslo 😀"}'},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
        assert engine.template_arguments[-1]["tools"] == [WEATHER, TIME]
        assert engine.forms[-1] is None
        choices = stream(client, tools=[WEATHER, TIME])
        streamed = joined(choices)
        assert (streamed["content"], streamed["finish_reason"]) == ("One moment.", "tool_calls")
        assert [call["function"] for call in streamed["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
        pieces = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert len(pieces) > 10, "arguments come as they are written"
        assert not any("<" in (choice["delta"].get("content") or "") for choice in choices)
        engine.tokens_per_delta = 1000
        assert joined(stream(client, tools=[WEATHER]))["tool_calls"][1]["function"]["arguments"] == '{"city": "Oslo 😀"}'


def test_the_official_client_accumulates_calls() -> None:
    with scripted(f"{ROME}\n{OSLO}") as (_, api, _):
        whole = api.chat.completions.create(model="fake", messages=MESSAGES, tools=[WEATHER], n=2)  # type: ignore[call-overload]
        for choice in whole.choices:
            assert choice.message.content is None
            assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Rome", "Oslo 😀"]
        with api.chat.completions.stream(model="fake", messages=MESSAGES, tools=[WEATHER]) as events:  # type: ignore[arg-type, list-item]
            kinds = [event.type for event in events]
            final = events.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert kinds.count("tool_calls.function.arguments.done") == 2
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        assert [call.function.name for call in final.message.tool_calls] == ["weather", "weather"]


def test_text_is_text_and_none_hides_the_tools() -> None:
    with scripted("a <tool> is <tool_call") as (engine, _, client):
        (choice,) = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]}).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a <tool> is <tool_call", "stop")
        assert "tool_calls" not in choice["message"]
        assert joined(stream(client, tools=[WEATHER]))["content"] == "a <tool> is <tool_call"
        engine.script = ROME
        none = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none"}).json()["choices"][0]
        assert (none["message"]["content"], none["finish_reason"]) == (ROME, "stop")
        assert engine.template_arguments[-1]["tools"] is None


def test_budgets_logprobs_and_single_calls() -> None:
    with scripted(f"{ROME}\n{OSLO}") as (_, _, client):
        cut = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 56}).json()["choices"][0]
        assert (cut["finish_reason"], cut["message"]["content"]) == ("length", None)
        assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "R'
        one = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}).json()["choices"][0]
        assert [json.loads(call["function"]["arguments"]) for call in one["message"]["tool_calls"]] == [{"city": "Rome"}]
        scored = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER], "logprobs": True}).json()
        choices = stream(client, tools=[WEATHER], logprobs=True)
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert entries == scored["choices"][0]["logprobs"]["content"]
        assert len(entries) == scored["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("tool_choice", "parallel", "reason", "words"),
    [
        ("required", True, "tool_calls", ("(JOINT", "call_1")),
        ("required", False, "tool_calls", ("calls: ", "call_1")),
        ({"type": "function", "function": {"name": "weather"}}, True, "stop", ("calls: ", "weather")),
    ],
)
def test_certain_calls_are_bound_by_a_grammar(tool_choice: Any, parallel: bool, reason: str, words: tuple[str, str]) -> None:
    with scripted(ROME) as (engine, _, client):
        body = {"messages": MESSAGES, "tools": [WEATHER, TIME], "tool_choice": tool_choice, "parallel_tool_calls": parallel}
        (choice,) = client.post(CHAT, json=body).json()["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["content"] is None
        form = engine.forms[-1]
        assert isinstance(form, StructuredOutputsParams)
        assert all(word in str(form.grammar) for word in words)
        assert ("call_1" in str(form.grammar)) == (tool_choice == "required")
        assert engine.template_arguments[-1]["tools"] == [WEATHER, TIME], "the prompt shows them all"


def test_strict_tools_bind_free_answers() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    with scripted(ROME) as (engine, _, client):
        client.post(CHAT, json={"messages": MESSAGES, "tools": [strict, TIME]}).raise_for_status()
        grammar = str(engine.forms[-1].grammar)  # type: ignore[attr-defined]
        assert "REST" in grammar
        assert '"required": ["city"]' in grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [1] * 513}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x-guidance": 5}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
        ({"tools": {"name": "f"}}, "tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}},
            "response_format.json_schema.extra",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    with scripted("x") as (engine, _, client):
        response = client.post(CHAT, json={"messages": MESSAGES, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert not engine.started


def test_a_template_without_tools_needs_a_parser_by_name() -> None:
    with scripted(ROME, "{{ messages }}") as (_, _, client):
        error = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]}).json()["error"]
        assert "no place for tools" in error["message"]
        assert "--tool-call-parser" in error["message"]
        client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none"}).raise_for_status()
    with scripted(ROME, "{{ messages }} {{ tools }}") as (_, _, client):
        assert "which form" in client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]}).json()["error"]["message"]
    with scripted(ROME, "{{ messages }}", tool_call_parser="hermes") as (engine, _, client):
        (choice,) = client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]}).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        prompt = engine.tokenizer.decode(engine.prompts[-1])
        assert prompt.startswith("system:# Tools")
        assert '"description": "Now."' in prompt


def test_parsers_by_name() -> None:
    for name in set(TOOL_PARSERS) - {"auto", "none"}:
        assert Abilities.of(None, name).format is FORMATS[name]
    assert set(TOOL_PARSERS) == {"auto", "none", *FORMATS}
    assert [Abilities.of(Template(THINKING), "none", name).thinks for name in REASONING_PARSERS] == [True, False, True, True, True]
    for options in ({"tool_call_parser": "xml"}, {"reasoning_parser": "loud"}):
        with pytest.raises(ConfigError, match=next(iter(options.values()))):
            ServerOptions(**options)  # type: ignore[arg-type]


def test_forms_reach_the_engine_in_any_words() -> None:
    schema = {"type": "integer"}
    with scripted("1") as (engine, _, client):
        named = {"name": "n", "schema": schema, "strict": True}
        for fields in (
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"structured_outputs": {"json": schema}},
            {"guided_json": schema},
            {"guided_json": json.dumps(schema)},
        ):
            client.post(CHAT, json={"messages": MESSAGES, **fields}).raise_for_status()
            client.post("/v1/completions", json={"prompt": "x", **fields}).raise_for_status()
            assert engine.forms[-2:] == [StructuredOutputsParams(json=schema)] * 2
        client.post(CHAT, json={"messages": MESSAGES, "response_format": {"type": "json_object"}}).raise_for_status()
        assert engine.forms[-1] == StructuredOutputsParams(json_object=True)
        client.post(CHAT, json={"messages": MESSAGES, "guided_choice": ["a", "b"]}).raise_for_status()
        assert engine.forms[-1] == StructuredOutputsParams(choice=["a", "b"])
        body = {"messages": MESSAGES, "guided_json": schema, "guided_whitespace_pattern": " "}
        client.post(CHAT, json=body).raise_for_status()
        assert engine.forms[-1] == StructuredOutputsParams(json=schema, whitespace_pattern=" ")
        both = {"messages": MESSAGES, "guided_json": schema, "tools": [WEATHER]}
        client.post(CHAT, json=both).raise_for_status()
        assert "calls | @form" in str(engine.forms[-1].grammar)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "script", ["<think>\nLet me see.\n</think>\n\nIt rains.", f"<think>Look up.</think>\n{ROME}", "<think>cut", "Plain."]
)
def test_thoughts_have_fields_of_their_own(script: str) -> None:
    with scripted(script, THINKING) as (_, _, client):
        body = {"messages": MESSAGES, "tools": [WEATHER]}
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
        thoughts = {"<think>\n": "Let me see.", "<think>L": "Look up.", "<think>c": "cut"}.get(script[:8])
        assert message["reasoning_content"] == message["reasoning"] == thoughts
        assert message["content"] == {"<think>\n": "It rains.", "Plain.": "Plain."}.get(script[:8])
        streamed = joined(stream(client, tools=[WEATHER]))
        assert streamed["reasoning_content"] == streamed["reasoning"] == (thoughts or "")
        assert streamed["content"] == (message["content"] or "")
        assert len(streamed["tool_calls"]) == len(message.get("tool_calls", ())) == ("Look" in script)


def test_reasoning_effort_and_what_the_prompt_opened() -> None:
    with scripted("It rains.", THINKING) as (engine, _, client):
        for effort, thinking in (("none", False), ("low", True), ("high", True)):
            client.post(CHAT, json={"messages": MESSAGES, "reasoning_effort": effort}).raise_for_status()
            assert engine.template_arguments[-1]["enable_thinking"] is thinking
        body = {"messages": MESSAGES, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
        client.post(CHAT, json=body).raise_for_status()
        assert engine.template_arguments[-1]["enable_thinking"] is False
        opened = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
        fields = {"messages": opened, "continue_final_message": True}
        engine.script = "hm </think> yes"
        message = client.post(CHAT, json=fields).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    with scripted("<think>x</think>y", THINKING, reasoning_parser="none") as (_, _, client):
        message = client.post(CHAT, json={"messages": MESSAGES}).json()["choices"][0]["message"]
        assert message["content"] == "<think>x</think>y"
        assert "reasoning" not in message


def test_history_with_calls_and_thoughts_is_legal() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Look up."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    with scripted("It rains.") as (_, _, client):
        client.post(CHAT, json={"messages": messages, "tools": [WEATHER]}).raise_for_status()
        call["function"]["arguments"] = "{"  # type: ignore[index]
        assert (
            client.post(CHAT, json={"messages": messages}).json()["error"]["param"]
            == "messages[1].tool_calls[0].function.arguments"
        )
        wizard = client.post(CHAT, json={"messages": [{"role": "wizard", "content": "x"}]})
        assert (wizard.status_code, wizard.json()["error"]["param"]) == (400, "messages[0].role")


def test_special_tokens_are_seen_where_they_are_marks() -> None:
    engine = FakeEngine(chat_template=Template("{{ tools }} [TOOL_CALLS] tool_calls"), script="x")
    assert Abilities.of(engine.chat_template).format is not None
    with serving(engine) as server, httpx.Client(base_url=server.url) as client:
        client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]}).raise_for_status()
        assert fake_of(server).started
