"""LangChain's `ChatOpenAI` and `OpenAI`, pointed at kvist: answers, streams, usage, tools and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr
from server_fakes import FakeEngine, ServerThread, fake_of, serving

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.options import ServerOptions

OPTIONS = ServerOptions(api_keys=("key",), warm_up=False)
QUESTION = [SystemMessage("Be brief."), HumanMessage("Count: one two three")]


@pytest.fixture(scope="module")
def keyed() -> Iterator[ServerThread]:
    with serving(FakeEngine(), OPTIONS) as server:
        yield server


def chat(server: ServerThread, model: str = "fake") -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key=SecretStr("key"), max_retries=0, stream_usage=True)


def test_answers_and_streams_are_the_same_and_counted(keyed: ServerThread) -> None:
    model = chat(keyed)
    whole = model.invoke(QUESTION)
    assert isinstance(whole, AIMessage)
    assert whole.content
    assert whole.usage_metadata is not None
    chunks = list(model.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [whole.usage_metadata["output_tokens"]]
    assert usages[0]["input_token_details"]["cache_read"] == (usages[0]["input_tokens"] - 1) // 16 * 16
    assert whole.response_metadata["finish_reason"] == "stop"


def test_a_prompt_that_is_too_long_is_known_as_such(keyed: ServerThread) -> None:
    """LangChain and LiteLLM go by words of the message."""
    with pytest.raises(ContextOverflowError, match="prompt is too long"):
        chat(keyed).invoke("x" * 1000)


def test_batches(keyed: ServerThread) -> None:
    answers = chat(keyed).batch([f"Question {i}" for i in range(8)])
    assert len({str(answer.content) for answer in answers}) == 8


def test_a_conversation_with_a_tool_s_result_is_taken(keyed: ServerThread) -> None:
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"at": "twig"}, "id": "call-1"}])
    answer = chat(keyed).invoke([*QUESTION, call, ToolMessage("a twig", tool_call_id="call-1")])
    assert answer.content
    assert fake_of(keyed).prompts


def test_plain_completions(keyed: ServerThread) -> None:
    model = OpenAI(model="fake", base_url=f"{keyed.url}/v1", api_key=SecretStr("key"), max_retries=0, max_tokens=200)
    assert model.invoke("hi", stop=["漢"]).endswith("caché ")
    assert "".join(model.stream("hi", stop=["漢"])) == model.invoke("hi", stop=["漢"])


class Choice(BaseModel):
    answer: bool


def test_structured_output_is_of_its_schema() -> None:
    """The tiny model is random: only a grammar makes it write JSON."""
    with serving(AsyncEngine(tiny_engine(ISAS[-1])), OPTIONS) as server:
        model = chat(server, "tiny").with_structured_output(Choice, method="json_schema", include_raw=True)
        result = model.invoke("yes?")
    assert isinstance(result, dict)
    assert isinstance(result["parsed"], Choice)
    assert set(json.loads(str(result["raw"].content))) == {"answer"}
