"""Forms and tools on the real small model, over a real socket and with the official client: what is asked for is what comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from server_fakes import ServerThread, serving, wait_until
from server_sse import CHAT, COMPLETIONS, error_of

from kvist.config import EngineOptions
from kvist.engine.async_engine import AsyncEngine
from kvist.server.options import ServerOptions
from kvist.text.grammar import MAX_OPTIONAL

pytestmark = pytest.mark.model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"enum": ["😀🧪漢字é", 7, None]},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "maxItems": 3}]},
    {
        "$defs": {"n": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "additionalProperties": False,
    },
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
PARAMETERS = {"get_weather": WEATHER["function"]["parameters"], "now": {"type": "object", "additionalProperties": False}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[ServerThread]:
    engine = AsyncEngine.from_options(EngineOptions(num_kv_blocks=200, max_num_batched_tokens=128))
    with serving(engine, ServerOptions(tool_call_parser="hermes")) as server:
        yield server


@pytest.fixture
def client(served: ServerThread) -> Iterator[httpx.Client]:
    """The engine is idle, and answers, after each test."""
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client
        snapshot = served.engine.snapshot
        wait_until(lambda: snapshot().num_running == snapshot().num_waiting == snapshot().blocks_by_state["live"] == 0, "idle")
        assert client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 4}).status_code == 200


@pytest.fixture
def api(served: ServerThread, client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": ASK, "max_tokens": 160, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def shaped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_validate_alone_and_together(client: httpx.Client, schema: dict[str, Any]) -> None:
    bodies = [{"temperature": t, "seed": seed, "response_format": shaped(schema)} for seed, t in enumerate((0, 1.5))]
    alone = [chat(client, **body)["choices"][0] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(chat, client, max_tokens=40, ignore_eos=True)
        together = [answer["choices"][0] for answer in pool.map(lambda body: chat(client, **body), bodies)]
        beside.result()
    assert [choice["message"]["content"] for choice in together] == [choice["message"]["content"] for choice in alone]
    for choice in alone:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_a_form_that_is_cut_is_a_beginning(client: httpx.Client) -> None:
    whole = chat(client, response_format=shaped(PERSON))
    text, tokens = whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]
    for budget in {1, 2, tokens // 2, tokens - 1}:
        cut = chat(client, response_format=shaped(PERSON), max_tokens=budget)
        assert cut["choices"][0]["finish_reason"] == "length"
        assert text.startswith(cut["choices"][0]["message"]["content"])
        assert cut["usage"]["completion_tokens"] == budget
    stopped = chat(client, response_format=shaped(PERSON), stop='"age"')["choices"][0]
    assert (stopped["message"]["content"], stopped["stop_reason"]) == (text.split('"age"')[0], '"age"')
    several = chat(client, response_format=shaped(PERSON), n=3, temperature=1, seed=4)["choices"]
    assert len({choice["message"]["content"] for choice in several}) > 1
    for choice in several:
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


@pytest.mark.parametrize("budget", range(1, 21, 3))
def test_characters_of_several_tokens(client: httpx.Client, budget: int) -> None:
    body = {"messages": ASK, "response_format": shaped({"enum": ["😀🧪漢字é"]}), "max_tokens": budget, "logprobs": True}
    whole = client.post(CHAT, json=body).json()["choices"][0]
    with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(line["choices"][0]["delta"].get("content", "") for line in lines) == whole["message"]["content"]
    assert "\ufffd" not in whole["message"]["content"]
    assert '"😀🧪漢字é"'.startswith(whole["message"]["content"])
    raw = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert '"😀🧪漢字é"'.encode().startswith(raw)


class Pet(BaseModel):
    name: str = Field(max_length=16)
    kind: Literal["cat", "dog"]


def test_the_official_clients_parse_helper(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="smollm2:135m",
        messages=[{"role": "user", "content": "Tell me of a pet."}],
        response_format=Pet,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)
    tool = openai.pydantic_function_tool(Pet, name="adopt")
    assert tool["function"]["strict"] is True
    called = api.chat.completions.parse(
        model="smollm2:135m", messages=[{"role": "user", "content": "Adopt a cat."}], tools=[tool], tool_choice="required",
        parallel_tool_calls=False, max_tokens=100, temperature=0,
    )  # fmt: skip
    assert called.choices[0].message.tool_calls is not None
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Pet)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}, {"type": "function", "function": {"name": "now"}}],
)
def test_certain_calls_always_parse(client: httpx.Client, api: openai.OpenAI, choice: Any) -> None:
    for seed in range(2):
        fields = {
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": seed,
            "seed": seed,
        }
        whole = chat(client, **fields)["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        assert whole["message"]["content"] is None
        assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[call["function"]["name"]])
        if choice != "required":
            assert call["function"]["name"] == choice["function"]["name"]
        with api.chat.completions.stream(model="smollm2:135m", messages=ASK, max_tokens=160, **fields) as events:  # type: ignore[arg-type]
            for _ in events:
                pass
            streamed = events.get_final_completion().choices[0]
        assert streamed.finish_reason == whole["finish_reason"]
        assert streamed.message.tool_calls is not None
        assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == [
            (call["function"]["name"], call["function"]["arguments"])
        ]


def test_free_calls_and_the_turn_after_them(client: httpx.Client) -> None:
    first = chat(client, tools=[WEATHER], tool_choice="auto", max_tokens=60)["choices"][0]
    assert first["finish_reason"] in ("stop", "tool_calls", "length")
    assert "<tool" not in (first["message"]["content"] or "")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    shown = chat(client, messages=history, tools=[WEATHER], max_tokens=1)["usage"]["prompt_tokens"]
    assert shown > chat(client, messages=ASK, tools=[WEATHER], max_tokens=1)["usage"]["prompt_tokens"] + 20, (
        "the model sees its call"
    )
    chat(client, messages=history, max_tokens=1)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for seed in range(2):
        message = chat(client, tools=[strict], temperature=1, seed=seed, max_tokens=60)["choices"][0]["message"]
        for made in message.get("tool_calls", ())[:-1]:
            jsonschema.validate(json.loads(made["function"]["arguments"]), PARAMETERS["get_weather"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": shaped({"type": "nope"})}, "response_format", "nope"),
        ({"response_format": shaped({"not": {}})}, "response_format", "not"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "nope"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_grammar": "("}, "guided_grammar", "expecting"),
        ({"guided_grammar": 'start: s\ns: s s | s s s | "a" | " "'}, "guided_grammar", "Too many items"),  # a second a mask
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
                "tool_choice": "required",
            },
            "tools",
            "Invalid type: x",
        ),
    ],
)
def test_what_cannot_be_followed_is_a_400(
    client: httpx.Client, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    error = error_of(client.post(CHAT, json={"messages": ASK, "stream": stream, **fields}), 400)
    assert error["param"] == param
    assert words in error["message"]
    if "tools" not in fields:
        assert error_of(client.post(COMPLETIONS, json={"prompt": "x", "stream": stream, **fields}), 400)["param"] == param


def test_as_many_properties_as_are_allowed_may_be_left_out(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(MAX_OPTIONAL)}}
    # Several draws: what a mask takes depends on where in a name the last token ended.
    many = {"n": 8, "seed": 1, "temperature": 1.5, "max_tokens": 20}
    answer = client.post(CHAT, json={"messages": ASK, "response_format": shaped(schema), **many})
    assert answer.status_code == 200, answer.text
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert len(set(texts)) > 1
    assert all(text.startswith("{") for text in texts)


def test_completions_take_forms_too(client: httpx.Client) -> None:
    body = {"prompt": ["The sky is", "Grass is"], "temperature": 0, "guided_choice": [" blue", " green"], "max_tokens": 9}
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["text"] in (" blue", " green") for choice in choices] == [True, True]
    number = client.post(
        COMPLETIONS, json={"prompt": "2 + 2 =", "temperature": 0, "guided_regex": " [0-9]+", "max_tokens": 3}
    ).json()
    assert number["choices"][0]["text"].strip().isdigit()
