"""Field cases A07 and A09: odd values, unknown and not-offered fields, malformed bodies, messages. A 4xx names each."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread, fake_of
from server_sse import CHAT, COMPLETIONS, error_of

CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT_BODY = {"prompt": "hi", "max_tokens": 4}


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, TEXT_BODY)])
@pytest.mark.parametrize(
    ("field", "literal"),
    [
        ("temperature", "-1"),
        ("temperature", '"hot"'),
        ("temperature", "NaN"),
        ("temperature", "1e999"),
        ("temperature", "-Infinity"),
        ("temperature", "true"),
        ("top_p", "0"),
        ("top_p", "-0.1"),
        ("top_p", "1.5"),
        ("top_p", "NaN"),
        ("top_k", "-5"),
        ("top_k", "1.5"),
        ("min_p", "2"),
        ("min_p", "NaN"),
        ("presence_penalty", "10"),
        ("frequency_penalty", "-10"),
        ("repetition_penalty", "0"),
        ("n", "0"),
        ("n", "1000"),
        ("n", "NaN"),
        ("max_tokens", "-1"),
        ("max_tokens", "1.0"),
        ("max_tokens", "1e400"),
        ("min_tokens", "-1"),
        ("min_tokens", "5"),
        ("seed", "1.5"),
        ("seed", "1" + "0" * 40),
        ("stop", "5"),
        ("stop", "[5]"),
        ("stop", '[""]'),
        ("stop", json.dumps(["a", "b" * 1001])),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "[1000000]"),
        ("logit_bias", '{"5": 1000}'),
        ("logit_bias", '{"5": NaN}'),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"99999": 1}'),
        ("logit_bias", "[]"),
        ("logprobs", "9999"),
        ("stream", '"yes"'),
        ("stream_options", '{"include_usage": true}'),
        ("ignore_eos", "1"),
        ("model", "5"),
        ("cache_salt", "7"),
    ],
)
def test_an_odd_value_is_refused_by_its_name(
    client: httpx.Client, path: str, body: dict[str, Any], field: str, literal: str
) -> None:
    rest = json.dumps({name: value for name, value in body.items() if name != field})
    raw = f'{rest[:-1]}, "{field}": {literal}}}'.encode()
    error = error_of(client.post(path, content=raw), 400)
    assert (error["param"] or "").split(".")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("fields", [{"temperature": 0.0001}, {"top_p": 0.0001}, {"temperature": 1e-30}])
def test_tiny_values_are_taken(client: httpx.Client, fields: dict[str, float]) -> None:
    greedy = client.post(COMPLETIONS, json=TEXT_BODY | {"temperature": 0}).json()["choices"][0]["text"]
    assert client.post(COMPLETIONS, json=TEXT_BODY | fields).json()["choices"][0]["text"] == greedy


@pytest.mark.parametrize(
    ("field", "neutral", "refused"),
    [
        ("response_format", [{"type": "text"}, None], [{"type": "xml"}, {}, 1]),
        ("tools", [[], None], [[{"type": "function", "function": {"name": "f"}}]]),
        ("tool_choice", ["none", None], ["required", {"type": "function"}, "always"]),
        ("parallel_tool_calls", [True, False, None], [1, "yes"]),
        ("functions", [[]], [[{"name": "f"}]]),
        ("function_call", ["none"], ["auto"]),
        ("modalities", [["text"]], [["text", "audio"]]),
        ("audio", [None], [{"voice": "x"}]),
        ("prediction", [None], [{"type": "content", "content": "x"}]),
        ("reasoning_effort", ["none", None], ["high"]),
        ("verbosity", ["medium", None], ["low"]),
        ("service_tier", ["auto", "default", None], ["priority"]),
        ("store", [False, None], [True]),
        ("suffix", [None, ""], [" end"]),
        ("web_search_options", [None], [{}]),
        ("prompt_cache_retention", ["in_memory", None], ["24h"]),
        ("user", ["someone", None], []),
        ("metadata", [{"a": "b"}], []),
        ("safety_identifier", ["x"], []),
        ("structured_outputs", [None], [{}, {"regex": "a", "json": {}}, []]),
        ("guided_json", [None], [3, "{"]),
        ("guided_regex", [None], [3]),
        ("guided_whitespace_pattern", [None], [" "]),
        ("guided_decoding_backend", [None], ["auto"]),
        ("no_such_field", [], [1]),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, TEXT_BODY)])
def test_fields_that_are_not_offered(
    client: httpx.Client, path: str, body: dict[str, Any], field: str, neutral: list[Any], refused: list[Any]
) -> None:
    for value in neutral:
        assert client.post(path, json=body | {field: value}).status_code == 200
    for value in refused:
        error = error_of(client.post(path, json=body | {field: value}), 400)
        assert error["param"] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "field"), [(COMPLETIONS, "max_completion_tokens"), (CHAT, "echo"), (COMPLETIONS, "top_logprobs"), (CHAT, "prompt")]
)
def test_a_field_of_the_other_route_is_refused(client: httpx.Client, path: str, field: str) -> None:
    body = CHAT_BODY if path == CHAT else TEXT_BODY
    assert error_of(client.post(path, json=body | {field: 1}), 400)["param"] == field


def test_best_of_is_n_or_nothing(client: httpx.Client) -> None:
    assert client.post(COMPLETIONS, json=TEXT_BODY | {"best_of": 1}).status_code == 200
    assert client.post(COMPLETIONS, json=TEXT_BODY | {"best_of": 2, "n": 2}).status_code == 200
    assert error_of(client.post(COMPLETIONS, json=TEXT_BODY | {"best_of": 2}), 400)["param"] == "best_of"


def test_prompts_and_choices_are_bounded_together(client: httpx.Client) -> None:
    body = TEXT_BODY | {"prompt": [[1]] * 32, "n": 65}
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert (error["param"], "2080 choices" in error["message"]) == ("n", True)
    assert len(client.post(COMPLETIONS, json=body | {"n": 2}).json()["choices"]) == 64


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"model":',
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "a"} extra',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
        b'{"prompt": "' + b'\\"' * 50_000,
    ],
)
def test_a_malformed_body(client: httpx.Client, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        assert error_of(client.post(path, content=raw), 400)["type"] == "invalid_request_error"


def test_missing_fields_are_named(client: httpx.Client) -> None:
    assert error_of(client.post(CHAT, json={}), 400)["param"] == "messages"
    assert error_of(client.post(COMPLETIONS, json={}), 400)["param"] == "prompt"


def test_the_model_is_checked(client: httpx.Client) -> None:
    for path, body in ((CHAT, CHAT_BODY), (COMPLETIONS, TEXT_BODY)):
        assert client.post(path, json=body).json()["model"] == "fake"
        error = error_of(client.post(path, json=body | {"model": "gpt-9"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"]
        assert "fake" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "x" * 100_000},
        {"response_format": {"type": ["x" * 100_000]}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "x" * 100_000},
        {"messages": [{"role": "user", "content": "a", "x" * 100_000: 1}]},
    ],
)
def test_an_error_is_short_whatever_was_sent(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post(CHAT, json=CHAT_BODY | fields)
    assert response.status_code in (400, 404)
    assert len(response.content) < 3000


def test_unknown_routes_and_methods_answer_alike(client: httpx.Client) -> None:
    assert error_of(client.get("/nowhere"), 404)["code"] == "not_found"
    assert error_of(client.post("/v1/nowhere", json={}), 404)["type"] == "invalid_request_error"
    assert error_of(client.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(client.post("/v1/models"), 405)["code"] == "method_not_allowed"
    assert error_of(client.get("/health/"), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "hi"}, "messages[1].role"),
        ({"role": 5, "content": "hi"}, "messages[1].role"),
        ({"content": "hi"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["text"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "mood": "good"}]}, "messages[1].content[0].mood"),
        ({"role": "user", "content": "hi", "mood": "good"}, "messages[1].mood"),
        ({"role": "user", "content": "hi", "name": 5}, "messages[1].name"),
        ({"role": "user", "content": "hi", "tool_calls": []}, "messages[1].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}, "messages[1].tool_calls[0]"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(client: httpx.Client, message: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, message]}
    assert error_of(client.post(CHAT, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "developer", "content": "be kind"},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ],
)
def test_legal_messages(client: httpx.Client, message: dict[str, Any]) -> None:
    assert client.post(CHAT, json={"messages": [message], "max_tokens": 1}).status_code == 200


def test_template_fields_reach_the_template(server: ServerThread, client: httpx.Client) -> None:
    engine = fake_of(server)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def arguments(**fields: Any) -> dict[str, Any]:
        assert client.post(CHAT, json={"messages": messages, "max_tokens": 1, **fields}).status_code == 200
        return engine.template_arguments[-1]

    plain = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
    assert arguments() == plain
    assert arguments(add_generation_prompt=False) == {**plain, "add_generation_prompt": False}
    assert arguments(continue_final_message=True) == {**plain, "add_generation_prompt": False, "continue_final_message": True}
    assert arguments(chat_template_kwargs={"thinking": True})["thinking"] is True
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert error_of(client.post(CHAT, json=both), 400)["param"] == "continue_final_message"
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "self"):
        reserved = {"messages": messages, "chat_template_kwargs": {name: []}}
        assert error_of(client.post(CHAT, json=reserved), 400)["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized(
    path: str, client: httpx.Client, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("the text was tokenized")

    text = "x" * 70_000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    monkeypatch.setattr(server.engine, "render_chat", never)
    monkeypatch.setattr(server.engine, "encode", never)
    error = error_of(client.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if path == CHAT else "prompt")
    assert "at least 11666 tokens" in error["message"]
    assert "holds 512" in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "application/json", "origin": "https://page.example"}, 200),
        ({}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
        ({"content-encoding": "identity"}, 200),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "https://page.example"}, 415),
        ({"origin": "https://page.example"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json-seq"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip, identity"}, 415),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, TEXT_BODY), ("/tokenize", {"prompt": "hi"})])
def test_a_body_is_json_and_says_nothing_else(
    client: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    """`curl -d` says that it sends a form, and is understood; a web page that says so is not: its browser asks nobody first."""
    raw = json.dumps(body).encode()
    encoded = "gzip" in headers.get("content-encoding", "")
    response = client.post(path, content=gzip.compress(raw) if encoded else raw, headers=headers)
    if status == 200:
        assert response.status_code == 200, response.text
        return
    error = error_of(response, 415)
    assert error["code"] == ("unsupported_encoding" if encoded else "unsupported_media_type")
    assert ("Content-Encoding" if encoded else "application/json") in error["message"]
