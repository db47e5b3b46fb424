"""The official `openai` client, pointed at kvist: answers, streams, log probabilities and the exceptions it makes of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolChoiceOptionParam
from pydantic import BaseModel
from server_fakes import FakeEngine, FakeTokenizer, serving

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.options import ServerOptions

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count: one two three"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(FakeEngine(), ServerOptions(api_keys=("key",))) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def api(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="key", max_retries=0) as client:
        yield client


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["fake"]
    assert api.models.retrieve("fake").owned_by == "kvist"


def test_chat_whole_and_streamed(api: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a prompt of this test alone"}]
    whole = api.chat.completions.create(model="fake", messages=messages, temperature=0, n=2)
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    texts = {0: "", 1: ""}
    usage = None
    chunks = api.chat.completions.create(
        model="fake", messages=messages, temperature=0, n=2, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_accumulates_the_same_answer(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1)
    with api.chat.completions.stream(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_completions_with_stop_logprobs_and_ids(api: openai.OpenAI) -> None:
    whole = api.completions.create(model="fake", prompt="hi", max_tokens=200, stop=["漢"], logprobs=1)
    choice = whole.choices[0]
    assert choice.text.endswith("caché ")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert whole.usage is not None
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens
    joined = "".join(
        chunk.choices[0].text for chunk in api.completions.create(model="fake", prompt="hi", max_tokens=200, stop="漢", stream=True)
    )
    assert joined == choice.text
    ids = FakeTokenizer().encode("hi")
    assert api.completions.create(model="fake", prompt=ids, max_tokens=200, stop="漢").choices[0].text == choice.text


def test_extra_fields_go_through(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model="fake", prompt="hi", max_tokens=300, extra_body={"ignore_eos": True, "top_k": 5, "min_p": 0.1}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 300


def test_errors_become_the_clients_exceptions(api: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="fake", messages=MESSAGES, temperature=5000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model="fake", prompt="x" * 1000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as locked, openai.OpenAI(base_url=address, api_key="no", max_retries=0) as other:
        other.models.list()
    assert locked.value.code == "invalid_api_key"


def test_an_error_in_mid_stream_is_raised() -> None:
    with (
        serving(FakeEngine(fail_after=3)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as api,
    ):
        seen = []
        chunks = api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="a twig broke"):
            seen.extend(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert seen == ["", " ", "T", "w"]
        with pytest.raises(openai.InternalServerError):
            api.chat.completions.create(model="fake", messages=MESSAGES)


def test_comments_in_a_stream_and_kvist_s_own_usage_do_not_disturb(api: openai.OpenAI) -> None:
    plain = api.chat.completions.create(model="fake", messages=MESSAGES).choices[0].message.content
    with api.chat.completions.with_streaming_response.create(
        model="fake", messages=MESSAGES, stream=True, extra_headers={"X-Kvist-Events": "1"}
    ) as raw:
        assert any(line.startswith(": kvist {") for line in raw.iter_lines())
    chunks = list(
        api.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Kvist-Events": "1"},
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == plain
    usage = chunks[-1].usage
    assert usage is not None
    kvist = usage.model_extra and usage.model_extra["kvist"]
    assert kvist
    assert [event["event"] for event in kvist["events"]] == ["waiting"]


def test_embeddings_are_refused_as_a_bad_request(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embedding"):
        api.embeddings.create(model="fake", input="twig")


class Twig(BaseModel):
    kind: Literal["twig", "leaf"]
    dry: bool


@pytest.fixture(scope="module")
def random_model() -> Iterator[openai.OpenAI]:
    """Only a grammar makes it write JSON, or call a tool."""
    engine, options = tiny_engine(ISAS[-1], model={"context": 4096}), ServerOptions(warm_up=False, tool_call_parser="hermes")
    with (
        serving(AsyncEngine(engine), options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as api,
    ):
        yield api


def test_answers_are_parsed_into_models_whole_and_streamed(random_model: openai.OpenAI) -> None:
    completions = random_model.chat.completions
    whole = completions.parse(model="tiny", messages=MESSAGES, response_format=Twig, seed=1).choices[0].message.parsed
    assert isinstance(whole, Twig)
    with completions.stream(model="tiny", messages=MESSAGES, response_format=Twig, seed=1) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.parsed == whole


def test_tool_calls_are_parsed_into_models_whole_and_streamed(random_model: openai.OpenAI) -> None:
    completions, tools = random_model.chat.completions, [openai.pydantic_function_tool(Twig)]
    named: ChatCompletionToolChoiceOptionParam = {"type": "function", "function": {"name": "Twig"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        whole = completions.parse(
            model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=2
        ).choices[0]
        assert whole.finish_reason == reason
        assert whole.message.tool_calls
        assert isinstance(whole.message.tool_calls[0].function.parsed_arguments, Twig)
        with completions.stream(
            model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=2
        ) as events:
            kinds = {event.type for event in events}
            final = events.get_final_completion().choices[0]
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert final.finish_reason == reason
        assert final.message.tool_calls
        assert final.message.tool_calls[0].function.parsed_arguments == whole.message.tool_calls[0].function.parsed_arguments


def test_three_choices_stream_their_own_logprobs(random_model: openai.OpenAI) -> None:
    fields = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 3,
        "seed": 3,
        "temperature": 2,
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = random_model.chat.completions.create(**fields)  # type: ignore[call-overload]
    texts, scores = ["", "", ""], [[], [], []]
    for chunk in random_model.chat.completions.create(**fields, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert scores == [choice.logprobs.content for choice in whole.choices]
    assert len(set(texts)) > 1
