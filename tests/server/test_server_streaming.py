"""Field case A01 and its kin: the shape of streams, to the letter, on a real socket."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, answer_ids, fake_of, serving, wait_until
from server_sse import CHAT, COMPLETIONS, check_stream, error_of, events_of, stream, text_of

QUESTION = {"messages": [{"role": "user", "content": "Count: one two three"}]}
PROMPT = {"prompt": "Count: one two three"}
ENDINGS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"max_tokens": 5}, "length"),
    "eos": ({"max_tokens": 400}, "stop"),
    "stop string": ({"max_tokens": 400, "stop": ["ché 漢"]}, "stop"),
    "second of two stop strings": ({"max_tokens": 400, "stop": ["zzzz", "and"]}, "stop"),
    "in the middle of a character": ({"max_tokens": 17}, "length"),
}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "temperature": 0, **(QUESTION if path == CHAT else PROMPT), **fields}


def whole_texts(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_keeps_its_shape_and_says_what_the_whole_answer_says(client: httpx.Client, path: str, ending: str, n: int) -> None:
    fields, reason = ENDINGS[ending]
    body = body_for(path, n=n, **fields)
    chunks = stream(client, path, body)
    assert check_stream(chunks, path, n) == [reason] * n
    texts = whole_texts(client, path, body)
    assert [text_of(chunks, i) for i in range(n)] == texts
    assert all("\ufffd" not in text for text in texts)
    if n == 2 and ending == "eos":
        assert texts[0] != texts[1]
    if ending == "stop string":
        assert all(text.endswith(": ca") for text in texts)


def test_every_budget_gives_the_same_text_in_both_modes(client: httpx.Client) -> None:
    texts = []
    for budget in range(1, 40):
        body = body_for(COMPLETIONS, max_tokens=budget)
        chunks = stream(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        [text] = whole_texts(client, COMPLETIONS, body)
        assert text_of(chunks) == text
        assert chunks[-1]["usage"]["completion_tokens"] == budget
        texts.append(text)
    assert any(one == other for one, other in pairwise(texts)), "no budget fell inside a character"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_last_and_alone_when_it_is_asked_for(client: httpx.Client, path: str) -> None:
    chunks = stream(client, path, body_for(path, n=2, max_tokens=6, stream_options={"include_usage": True}))
    check_stream(chunks, path, 2)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    whole = client.post(path, json=body_for(path, n=2, max_tokens=6)).json()["usage"]
    assert usage["completion_tokens"] == whole["completion_tokens"] == 12
    assert usage["prompt_tokens"] == whole["prompt_tokens"] == len(fake_prompt(path))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def fake_prompt(path: str) -> str:
    """As many characters as the fake has tokens for the prompt: BOS, and in a chat the end of a turn."""
    return "#" + ("user:Count: one two three#assistant:" if path == CHAT else "Count: one two three")


def test_usage_is_absent_when_it_is_not_asked_for(client: httpx.Client) -> None:
    for options in (None, {"include_usage": False}):
        chunks = stream(client, CHAT, body_for(CHAT, max_tokens=3, stream_options=options))
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


def test_cached_tokens_are_always_there(client: httpx.Client) -> None:
    body = {"prompt": list(range(100, 148)), "max_tokens": 2, "cache_salt": "A10"}
    seen = []
    for _ in range(2):
        usage = client.post(COMPLETIONS, json=body).json()["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert usage["prompt_tokens"] == 48
    chunks = stream(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    seen.append(chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0, 32, 32]


def test_deltas_that_come_together_are_written_together_and_none_is_lost() -> None:
    with serving(FakeEngine(tokens_per_delta=7)) as server, httpx.Client(base_url=server.url) as client:
        chunks = stream(client, CHAT, body_for(CHAT))
        assert check_stream(chunks, CHAT, 1) == ["stop"]
        assert [text_of(chunks)] == whole_texts(client, CHAT, body_for(CHAT))


def test_an_error_in_mid_stream_is_an_event_and_ends_the_stream() -> None:
    with serving(FakeEngine(fail_after=4)) as server, httpx.Client(base_url=server.url) as client:
        for path in (CHAT, COMPLETIONS):
            response = client.post(path, json=body_for(path, stream=True))
            assert response.status_code == 200
            *before, last = events_of(response.content)
            assert before
            assert all('"finish_reason":null' in event for event in before)
            assert last.startswith('{"error":{"message":"The engine failed: a twig broke.","type":"server_error"')
            error = error_of(client.post(path, json=body_for(path)), 500)
            assert error["message"] == "The engine failed: a twig broke."


def test_a_refusal_comes_before_the_stream(client: httpx.Client) -> None:
    long = "x" * 600
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": long}]}), (COMPLETIONS, {"prompt": ["short", long]})):
        for mode in (False, True):
            error = error_of(client.post(path, json=body | {"stream": mode}), 400)
            assert error["code"] == "context_length_exceeded"
            assert "512" in error["message"]
            assert error["param"] == ("messages" if path == CHAT else "prompt")


def test_chat_logprobs_are_the_same_in_both_modes(client: httpx.Client) -> None:
    body = body_for(CHAT, logprobs=True, top_logprobs=2, max_tokens=30)
    whole = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    chunks = stream(client, CHAT, body)
    check_stream(chunks, CHAT, 1)
    streamed = [
        entry for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert len(whole) == 30
    assert [bytes(entry["bytes"]) for entry in whole] == [bytes([i - 3]) for i in answer_ids(chat_prompt_ids(), 0)[:30]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


def chat_prompt_ids() -> list[int]:
    return [1, *(3 + b for b in b"user:Count: one two three"), 2, *(3 + b for b in b"assistant:")]


def test_many_streams_at_once_equal_their_plain_runs(client: httpx.Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bodies = [body_for(COMPLETIONS, prompt=f"prompt number {i}", max_tokens=60) for i in range(32)]
    plain = [whole_texts(client, COMPLETIONS, body)[0] for body in bodies]
    assert len(set(plain)) == 32
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda body: stream(client, COMPLETIONS, body), bodies))
    for chunks, text in zip(results, plain, strict=True):
        assert check_stream(chunks, COMPLETIONS, 1) == ["stop"]
        assert text_of(chunks) == text


def test_the_first_chunk_does_not_wait_for_the_last() -> None:
    with serving(FakeEngine()) as server, httpx.Client(base_url=server.url) as client:
        engine = fake_of(server)
        body = body_for(COMPLETIONS, max_tokens=400, stream=True, ignore_eos=True)
        with engine.held(after=1), client.stream("POST", COMPLETIONS, json=body) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            assert first.startswith(b'data: {"id":"cmpl-')
            wait_until(lambda: engine.running == 1, "the stream is open while the engine is held")
            assert client.get("/health").json() == {"status": "ok"}
            engine.release()
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
