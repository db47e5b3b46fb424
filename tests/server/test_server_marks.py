"""Thoughts and calls whose marks are special tokens, as Mistral's and DeepSeek's are, through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
from server_fakes import serving
from server_sse import CHAT
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from helpers.tiny_engine import ISAS, tiny_loaded
from helpers.tiny_models import TinyModel, tokenizer_json
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.engine import Engine
from kvist.server.options import ServerOptions
from kvist.text.chat_template import ChatTemplate
from kvist.text.tokenizer import load_tokenizer

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
TALK = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}<|im_start|>"
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "temperature": 0}


def engine_with(template: str) -> AsyncEngine:
    loaded = tiny_loaded(ISAS[-1], model={"vocab": 288})
    backend = Backend.from_str(tokenizer_json(TinyModel()))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    info = replace(loaded.tokenizer.info, vocab_size=backend.get_vocab_size())
    tokenizer = load_tokenizer(backend.to_str().encode(), info)
    assert all(tokenizer.special_token_id(mark) is not None for mark in MARKS)
    return AsyncEngine(Engine(loaded._replace(tokenizer=tokenizer, chat_template=ChatTemplate(template, info))))


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with (
        serving(engine_with(request.param), ServerOptions(warm_up=False)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def streamed(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", CHAT, json={**BODY, **fields, "stream": True}) as response:
        return [json.loads(line[6:])["choices"][0]["delta"] for line in response.iter_lines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "client",
    [TALK + "{{ tools }}<tool_call>", TALK + "{{ tools }}[TOOL_CALLS]", TALK + "{{ tools }}[TOOL_CALLS][ARGS]"],
    indirect=True,
)
def test_bound_calls(client: httpx.Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        fields = {"tools": [PICK], "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.post(CHAT, json=BODY | fields).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert answer["message"]["content"] is None
        jsonschema.validate(json.loads(call["function"]["arguments"]), PICK["function"]["parameters"])
        deltas = streamed(client, **fields)
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
        assert pieces[0]["function"]["name"] == "pick"
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
        assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize("client", [TALK + "<think>\n{# </think> #}"], indirect=True)
def test_a_form_behind_thoughts_that_the_prompt_opened(client: httpx.Client) -> None:
    """The end of the thoughts is made likely, as the tiny model would not find it."""
    engine_ids = client.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    assert len(engine_ids) == 1
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {str(engine_ids[0]): 100}}
    message = client.post(CHAT, json=BODY | form).json()["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    unbiased = client.post(CHAT, json=BODY | {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}).json()["choices"][
        0
    ]
    assert unbiased["finish_reason"] == "length"
    assert unbiased["message"]["content"] is None
    assert unbiased["message"]["reasoning"]
