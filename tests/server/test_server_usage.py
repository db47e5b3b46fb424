"""What a client learns of its request: the `kvist` object in usage, usage in every chunk, event comments and signs of life."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, fake_of, serving, wait_until
from server_sse import CHAT, COMPLETIONS, check_stream, error_of, events_of, stream

from helpers.pace import gathering
from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.options import ServerOptions

EVENTS = {"X-Kvist-Events": "1"}
KVIST_FIELDS = {"queue_time", "time_to_first_token", "prompt_tokens_by_source", "preemptions", "stall_time", "prefix_miss"}


@pytest.fixture(scope="module")
def tight_engine() -> AsyncEngine:
    """Its pool holds 12 blocks: two long requests cannot both run to their end."""
    return AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=12, max_num_seqs=2))


@pytest.fixture(scope="module")
def tight_server(tight_engine: AsyncEngine) -> Iterator[ServerThread]:
    with serving(tight_engine) as server:
        yield server


@pytest.fixture
def tight(tight_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tight_server.url, timeout=60) as client:
        yield client


def ids(start: int, count: int) -> list[int]:
    return [10 + (start * 37 + i * i) % 200 for i in range(count)]


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **fields}


def comments_and_data(raw: bytes) -> tuple[list[str], list[str]]:
    """Of a stream whose records are one line each."""
    records = raw.decode("ascii").removesuffix("\n\n").split("\n\n")
    assert all(len(record.splitlines()) == 1 for record in records)
    comments = [record.removeprefix(": ") for record in records if record.startswith(": ")]
    data = [record.removeprefix("data: ") for record in records if record.startswith("data: ")]
    assert len(comments) + len(data) == len(records)
    return comments, data


@pytest.mark.parametrize("streamed", [False, True])
def test_usage_says_where_the_prompt_came_from_and_why_no_more_was_found(tight: httpx.Client, streamed: bool) -> None:
    found = []
    for prompt in (ids(streamed, 40), ids(streamed, 40), [*ids(streamed, 20), *ids(7 + streamed, 20)]):
        if streamed:
            usage = stream(tight, COMPLETIONS, body(prompt, stream_options={"include_usage": True}))[-1]["usage"]
        else:
            usage = tight.post(COMPLETIONS, json=body(prompt)).json()["usage"]
        kvist = usage["kvist"]
        assert set(kvist) == KVIST_FIELDS
        assert sum(kvist["prompt_tokens_by_source"].values()) == usage["prompt_tokens"] == 40
        assert kvist["prompt_tokens_by_source"]["prefix_hit"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 <= kvist["queue_time"] <= kvist["time_to_first_token"]
        assert (kvist["preemptions"], kvist["stall_time"]) == (0, 0)
        miss = kvist["prefix_miss"]
        found.append((kvist["prompt_tokens_by_source"]["prefix_hit"], miss["reason"], miss["position"]))
    assert found[1:2] == [(39, "last_token", 39)]
    assert [(hit, position) for hit, _, position in found] == [(0, 0), (39, 39), (20, 20)]
    assert {found[0][1], found[2][1]} <= {"never_seen", "not_found"}


def test_several_prompts_and_choices_add_up(tight: httpx.Client) -> None:
    usage = tight.post(COMPLETIONS, json=body([ids(50, 20), ids(51, 30)], n=2, max_tokens=3)).json()["usage"]
    assert usage["prompt_tokens"] == 50 == sum(usage["kvist"]["prompt_tokens_by_source"].values())
    assert usage["completion_tokens"] == 12


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_every_chunk_counts_its_own_choice(client: httpx.Client, path: str) -> None:
    prompt = {"prompt": ["ab", "abcd"]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, path, {**prompt, "max_tokens": 6, "stream_options": options})
    check_stream(chunks, path, 2)
    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
        if path == COMPLETIONS:
            assert usage["prompt_tokens"] == (3, 5)[chunk["choices"][0]["index"]]
    for numbers in counts.values():
        assert numbers == sorted(numbers)
        assert numbers[-1] == 6
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_usage_in_every_chunk_needs_usage_at_all(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert error_of(response, 400)["param"] == "stream_options.continuous_usage_stats"


def test_events_are_comments_at_their_moment(tight: httpx.Client, tight_engine: AsyncEngine) -> None:
    """Three prompts at once: the third finds no seat, and the second outgrows the pool, is preempted and resumed."""
    prompts = [ids(60 + i, 60) for i in range(3)]
    request = body(prompts, max_tokens=90, stream=True, stream_options={"include_usage": True})
    with gathering(tight_engine, 3):
        response = tight.post(COMPLETIONS, json=request, headers=EVENTS)
    comments, data = comments_and_data(response.content)
    assert data.pop() == "[DONE]"
    chunks = [json.loads(item) for item in data]
    happened = [json.loads(text.removeprefix("kvist ")) for text in comments]
    kinds = [[event["event"] for event in happened if event["choice"] == choice] for choice in range(3)]
    kvist = chunks[-1]["usage"]["kvist"]
    assert kvist["events"] == happened
    assert kvist["preemptions"] == sum(names.count("preempted") for names in kinds) > 0
    assert kvist["stall_time"] > 0
    assert kinds[0] == [], "the oldest never waits"
    assert kinds[2][:2] == ["waiting", "started"]
    for choice, names in enumerate(kinds):
        assert ("preempted" in names) <= ("resumed" in names)
        plain = tight.post(COMPLETIONS, json=body(prompts[choice], max_tokens=90)).json()["choices"][0]["text"]
        assert "".join(item["text"] for chunk in chunks for item in chunk["choices"] if item["index"] == choice) == plain
    for event in happened:
        if event["event"] == "preempted":
            assert event["tokens_lost"] > 0
    first = response.content.index(b': kvist {"event":"preempted"')
    assert b"data: {" in response.content[:first], "the client had tokens before"
    assert b"data: {" in response.content[first:], "and after"


def test_a_whole_answer_lists_its_events(tight: httpx.Client, tight_engine: AsyncEngine) -> None:
    request = body([ids(80 + i, 60) for i in range(3)], max_tokens=30)
    with gathering(tight_engine, 3):
        answer = tight.post(COMPLETIONS, json=request, headers=EVENTS).json()
    events = [(event["choice"], event["event"]) for event in answer["usage"]["kvist"]["events"]]
    assert (2, "waiting") in events
    assert (2, "started") in events


def test_who_does_not_ask_gets_no_comments_and_the_header_has_two_values(tight: httpx.Client) -> None:
    request = body(ids(90, 20), stream=True)
    assert events_of(tight.post(COMPLETIONS, json=request, headers={"X-Kvist-Events": "0"}).content)[-1] == "[DONE]"
    assert error_of(tight.post(COMPLETIONS, json=request, headers={"X-Kvist-Events": "yes"}), 400)["param"] == "X-Kvist-Events"


def test_a_silent_stream_says_that_it_lives_and_a_busy_one_does_not() -> None:
    with serving(FakeEngine(), ServerOptions(keep_alive_seconds=0.05)) as server, httpx.Client(base_url=server.url) as client:
        engine = fake_of(server)
        request = {"prompt": "ab", "max_tokens": 4, "stream": True}
        with engine.held(), client.stream("POST", COMPLETIONS, json=request, timeout=20) as response:
            assert response.status_code == 200
            source = response.iter_lines()
            lines = [next(source), next(source), next(source)]
            assert lines == [": keep-alive", "", ": keep-alive"]
            engine.release()
            rest = [line for line in source if line and line != ": keep-alive"]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 4
        wait_until(lambda: engine.running == 0, "the stream has ended")


def test_the_sign_of_life_is_fifteen_seconds_of_silence_away() -> None:
    assert ServerOptions().keep_alive_seconds == 15.0
