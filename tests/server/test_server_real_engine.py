"""The HTTP room over the real engine and a tiny random model: exactness, aborts, budgets and fairness as a client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from server_fakes import ServerThread, serving, wait_until
from server_sse import CHAT, COMPLETIONS, check_stream, error_of, stream, text_of

from helpers.pace import gathering, in_step
from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server import warmup
from kvist.server.connection import Connection
from kvist.server.keys import make_key
from kvist.server.options import ServerOptions
from kvist.server.sse import EventStream


@pytest.fixture(scope="module")
def real_engine() -> AsyncEngine:
    return AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=128))


@pytest.fixture(scope="module")
def real_server(real_engine: AsyncEngine) -> Iterator[ServerThread]:
    with serving(real_engine) as server:
        yield server


@pytest.fixture
def real(real_server: ServerThread) -> Iterator[httpx.Client]:
    """A client; the engine is idle, with all blocks free or cached, before and after."""
    with httpx.Client(base_url=real_server.url, timeout=60) as client:
        yield client
        wait_until(lambda: idle(real_server), "the engine is idle with all its blocks")
        assert client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 4}).status_code == 200


def idle(server: ServerThread) -> bool:
    now = server.engine.snapshot()
    blocks = now.blocks_by_state
    return now.num_running == now.num_waiting == 0 and blocks["free"] + blocks["cached"] == server.engine.config.num_kv_blocks


def greedy(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}


def answer(client: httpx.Client, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def text(client: httpx.Client, body: dict[str, Any]) -> str:
    return str(answer(client, body)["choices"][0]["text"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_streams_equal_whole_answers(real: httpx.Client, path: str, n: int) -> None:
    prompt = {"messages": [{"role": "user", "content": "hello the win"}]} if path == CHAT else {"prompt": "hello the win"}
    body = {**prompt, "n": n, "seed": 7, "temperature": 1.5, "max_tokens": 30}
    whole = answer(real, body, path)["choices"]
    chunks = stream(real, path, body)
    assert check_stream(chunks, path, n) == [choice["finish_reason"] for choice in whole]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole]
    assert [text_of(chunks, i) for i in range(n)] == texts
    assert len(set(texts)) > 1 or n == 1


def test_thirty_two_streams_at_once_equal_their_plain_runs(real_server: ServerThread, real: httpx.Client) -> None:
    bodies = [greedy(f"{i} hello the {i * i} king", max_tokens=16) for i in range(32)]
    plain = [text(real, body) for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        streams = list(pool.map(lambda body: stream(real, COMPLETIONS, body), bodies))
    for chunks, expected in zip(streams, plain, strict=True):
        check_stream(chunks, COMPLETIONS, 1)
        assert text_of(chunks) == expected


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """What is written at once, and what by the responses' tasks."""
    at_once: list[str] = []
    by_tasks: list[str] = []
    write_piece, write = Connection.write_piece, EventStream.write

    def writing(self: Connection, piece: str) -> None:
        at_once.append(piece)
        write_piece(self, piece)

    async def writing_slowly(self: EventStream, texts: Iterable[str]) -> None:
        by_tasks.append("".join(texts))
        await write(self, [by_tasks[-1]])

    monkeypatch.setattr(Connection, "write_piece", writing)
    monkeypatch.setattr(EventStream, "write", writing_slowly)
    return at_once, by_tasks


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_chunks_in_mid_answer_are_written_at_once(
    real_engine: AsyncEngine,
    real: httpx.Client,
    path: str,
    n: int,
    full: bool,
    written: tuple[list[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a task that is woken for each; the stream is the same. Where the client has not taken what was written, the task
    waits for it with the next, and then all goes on as before."""
    at_once, by_tasks = written
    write_piece = Connection.write_piece

    def filling(self: Connection, piece: str) -> None:
        write_piece(self, piece)
        if full and len(at_once) == 5:
            self.pause_writing()
            take_all(self)

    def take_all(connection: Connection) -> None:
        (stream,) = real_engine._streams.values()
        if stream._waiter is not None and stream._waiter.done():
            connection.resume_writing()
        else:
            connection.loop.call_later(0.01, take_all, connection)

    prompt = {"messages": [{"role": "user", "content": "hello the win"}]} if path == CHAT else {"prompt": "hello the win"}
    body = {**prompt, "n": n, "seed": 7, "temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
    whole = answer(real, body, path)["choices"]
    monkeypatch.setattr(Connection, "write_piece", filling)
    with in_step(real_engine):
        chunks = stream(real, path, body | {"stream_options": {"include_usage": True}})
    check_stream(chunks, path, n)
    assert [text_of(chunks, i) for i in range(n)] == [c["message"]["content"] if path == CHAT else c["text"] for c in whole]
    assert chunks[-1]["usage"]["completion_tokens"] == 20 * n
    # The first step, the last, and what closes the stream; what came to a full client, up to the first that brought text.
    assert 3 < len(by_tasks) < 7 if full else len(by_tasks) == 3
    assert 9 < len(at_once) <= 21 - len(by_tasks), "all others that bring text"
    assert sum(text.count("data: ") for text in (*by_tasks, *at_once)) == len(chunks) + 1
    assert all(piece.startswith("data: {") and piece.endswith("\n\n") for piece in at_once)


def test_stop_strings_cut_exactly(real: httpx.Client) -> None:
    whole = text(real, greedy("hello the", max_tokens=40, temperature=1, seed=3))
    stops = [whole[i : i + 3] for i in range(2, len(whole) - 3, 3)]
    assert len(stops) > 5
    for stop in stops:
        body = greedy("hello the", max_tokens=40, temperature=1, seed=3, stop=["zzzz", stop])
        choice = answer(real, body)["choices"][0]
        assert choice["text"] == whole[: whole.find(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = stream(real, COMPLETIONS, body)
        assert text_of(chunks) == choice["text"]
        kept = text(real, body | {"include_stop_str_in_output": True})
        assert kept == choice["text"] + stop


def test_hits_are_counted_and_change_nothing(real: httpx.Client) -> None:
    for size, hit in ((1, 0), (15, 14), (16, 15), (17, 16), (47, 46), (48, 47), (49, 48)):
        ids = [3 + (size * 31 + i * 7) % 250 for i in range(size)]
        answers = [answer(real, greedy(ids, max_tokens=8)) for _ in range(3)]
        assert len({item["choices"][0]["text"] for item in answers}) == 1
        cached = [item["usage"]["prompt_tokens_details"]["cached_tokens"] for item in answers]
        assert cached == [0, hit, hit]
        assert {item["usage"]["prompt_tokens"] for item in answers} == {size}


def test_a_salt_keeps_tenants_apart(real: httpx.Client) -> None:
    ids = list(range(40, 90))
    cached = [
        answer(real, greedy(ids, max_tokens=1, cache_salt=salt))["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "b", "a", "b")
    ]
    assert cached == [0, 0, 48, 48]


def test_a_tenant_cannot_see_the_prefix_of_another() -> None:
    """Not in `cached_tokens`, and not in the tokens computed; its own prefix it finds again, whatever it calls it."""
    body = greedy(list(range(40, 90)), max_tokens=1)

    def cached(server: ServerThread, key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        result = httpx.post(server.url + COMPLETIONS, json=body | fields, headers=headers, timeout=60).json()
        return int(result["usage"]["prompt_tokens_details"]["cached_tokens"])

    keys = ("alice-key", "bob-key")
    with serving(AsyncEngine(tiny_engine(ISAS[-1])), ServerOptions(api_keys=keys, warm_up=False)) as server:
        assert [cached(server, key) for key in keys * 2] == [0, 0, 48, 48]
        assert [cached(server, key, cache_salt="s") for key in keys * 2] == [0, 0, 48, 48]
        assert cached(server, keys[1], cache_salt=make_key(keys[0]).salt("")) == 0, "not even by its salt"
        assert server.engine.snapshot().prompt_tokens_by_source["computed"] == 5 * 50 + 4 * 2
    options = ServerOptions(api_keys=keys, key_isolation=False, warm_up=False)
    with serving(AsyncEngine(tiny_engine(ISAS[-1])), options) as server:
        assert [cached(server, key) for key in keys] == [0, 48]


def test_scoring_matches_generation(real: httpx.Client) -> None:
    generated = answer(real, greedy("hello", max_tokens=10, logprobs=3))["choices"][0]
    ids = answer(real, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert ids["usage"]["completion_tokens"] == 0
    again = answer(real, greedy("hello", max_tokens=10, echo=True, logprobs=3))["choices"][0]
    size = len(generated["logprobs"]["tokens"])
    assert size == 10
    assert again["logprobs"]["token_logprobs"][-size:] == generated["logprobs"]["token_logprobs"]
    assert again["logprobs"]["token_logprobs"][0] is None
    prompt_tokens = ids["usage"]["prompt_tokens"]
    assert {len(values) for values in again["logprobs"].values()} == {prompt_tokens + 10}
    assert again["text"] == "hello" + generated["text"]


def test_clients_that_leave_give_everything_back(real_server: ServerThread, real: httpx.Client) -> None:
    shared = list(range(60, 92))
    survivor = greedy([*shared, 9], max_tokens=100)
    plain = text(real, survivor)
    raw = json.dumps(greedy([*shared, *range(100, 132)], max_tokens=300)).encode()
    for i in range(3):
        connections = []
        before = real_server.engine.snapshot().generated_tokens
        for j in range(12):
            body = raw.replace(b'"max_tokens"', b'"stream": true, "max_tokens"') if j % 2 else raw
            connection = real_server.connect()
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            connections.append(connection)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(text, real, survivor)
            wait_until(lambda: real_server.engine.snapshot().generated_tokens > before + 20, "they run")  # noqa: B023
            for connection in connections:
                connection.close()
            assert future.result() == plain, f"round {i}"
        wait_until(lambda: idle(real_server), "all blocks came back")
        generated = real_server.engine.snapshot().generated_tokens
        assert real.get("/health").status_code == 200
        assert real_server.engine.snapshot().generated_tokens == generated
    limit = real_server.engine.config.effective_max_len
    assert answer(real, greedy([5] * (limit * 9 // 10), max_tokens=4))["usage"]["completion_tokens"] == 4


def test_a_long_prompt_does_not_freeze_the_others(
    real_server: ServerThread, real_engine: AsyncEngine, real: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = greedy("hello", max_tokens=480)
    plain = text(real, body)
    engine, generate = real_engine, real_engine.generate
    counts: list[int] = []

    async def counting(request_id: str, ids: list[int], params: Any, **keywords: Any) -> AsyncIterator[Any]:
        """Tokens that the engine had drawn when the long prompt came, and when its first token was there."""
        if len(ids) == 500:
            counts.append(engine.snapshot().generated_tokens)
        async for deltas in generate(request_id, ids, params, **keywords):
            if len(ids) == 500:
                counts.append(engine.snapshot().generated_tokens)
            yield deltas

    monkeypatch.setattr(engine, "generate", counting)
    with (
        gathering(engine, 2, after=20),
        real.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = (line for line in response.iter_lines() if line)
        received = [next(lines)]
        newcomer = pool.submit(lambda: answer(real, greedy([7] * 500, max_tokens=1)))
        assert [httpx.get(f"{real_server.url}/health").status_code for _ in range(5)] == [200] * 5
        received += lines
        assert newcomer.result()["usage"]["prompt_tokens"] == 500
    # 500 tokens, 63 a step beside the stream's own row, take eight steps; the newcomer's first token comes with the last of them.
    assert counts[1] - counts[0] >= 9
    chunks = [json.loads(line.removeprefix("data: ")) for line in received[:-1]]
    assert received[-1] == "data: [DONE]"
    assert text_of(chunks) == plain


def test_what_cannot_fit_is_refused_and_blocks_nobody() -> None:
    engine = AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=16))
    with serving(engine) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        error = error_of(client.post(COMPLETIONS, json=greedy([5] * 300)), 400)
        assert error["code"] == "context_length_exceeded"
        assert "300" in error["message"]
        assert str(engine.config.effective_max_len) in error["message"]
        assert answer(client, greedy([5] * 8, max_tokens=8))["usage"]["completion_tokens"] == 8
        limit = engine.config.effective_max_len
        result = answer(client, greedy([5] * 200, max_tokens=200))
        assert result["choices"][0]["finish_reason"] == "length"
        assert result["usage"]["total_tokens"] == limit
        four = answer(client, greedy([5] * 100, n=4, max_tokens=20))
        assert [choice["finish_reason"] for choice in four["choices"]] == ["length"] * 4


def test_one_bos_at_most() -> None:
    with (
        serving(AsyncEngine(tiny_engine(ISAS[-1], add_bos=True))) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        sizes = [
            answer(client, greedy(prompt, max_tokens=1))["usage"]["prompt_tokens"]
            for prompt in ("x", "<|im_start|>x", [1, 3], "", [1, 1, 3])
        ]
        assert sizes == [2, 2, 2, 1, 3]


def test_sources_add_up_in_the_metrics() -> None:
    with (
        serving(AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=64))) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        bodies = [greedy([3 + i % 5] * (20 + i), max_tokens=5) for i in range(20)]
        with ThreadPoolExecutor(8) as pool:
            usages = [item["usage"] for item in pool.map(lambda body: answer(client, body), bodies + bodies)]
        sources = server.engine.snapshot().prompt_tokens_by_source
        assert sources["prefix_hit"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) > 0
        assert sum(sources.values()) == sum(usage["prompt_tokens"] for usage in usages)
        scraped = client.get("/metrics").text
        assert f'kvist:prompt_tokens_total{{source="prefix_hit"}} {float(sources["prefix_hit"])}' in scraped
        assert f"kvist:generated_tokens_total {float(40 * 5)}" in scraped
        assert 'kvist:kv_blocks{state="live"} 0.0' in scraped


def test_the_openai_client_talks_to_the_real_engine(real_server: ServerThread, real: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as api:
        messages: Any = [{"role": "user", "content": "hello"}]
        whole = api.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
        )
        joined = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in api.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True)
        )
        assert joined == whole.choices[0].message.content
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        for entry in whole.choices[0].logprobs.content:
            assert entry.logprob == entry.top_logprobs[0].logprob, "a greedy run takes the likeliest token"
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="nobody", messages=messages)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_form_that_takes_too_long_is_the_clients_mistake(real: httpx.Client, streamed: bool) -> None:
    wide = f"x{{5}}({'|'.join(f'[yz]{{{n}}}a' for n in range(1, 3000))})"
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": wide, "stream": streamed}
    response = real.post(CHAT, json=body)
    error = json.loads(response.text.rstrip().rpartition("data: ")[2])["error"] if streamed else error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert "cannot be followed" in error["message"]


def test_the_tables_of_forms_are_made_unasked_behind_the_start() -> None:
    engine = AsyncEngine(tiny_engine(ISAS[-1]))
    with serving(engine, ServerOptions()) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/ready").status_code == 200
        wait_until(lambda: engine._engine.forms.grammars.num_kept == 1, "the first form is compiled")
        wait_until(lambda: engine.snapshot().generated_tokens == 2, "and a token drawn by it")


def test_a_server_that_ends_before_its_tables_are_made_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "FORMS_AFTER_SECONDS", 60)
    engine = AsyncEngine(tiny_engine(ISAS[-1]))
    with serving(engine, ServerOptions()) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
    assert engine.health is not None
    assert engine._engine.forms.grammars.num_kept == 0
