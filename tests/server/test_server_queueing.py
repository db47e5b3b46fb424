"""Queue limits: what counts as waiting, who is refused, and what is predicted for those who are."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import FakeEngine, ServerThread, config, serving, wait_until
from server_sse import CHAT, COMPLETIONS, error_of

from kvist.errors import ConfigError
from kvist.server.failures import Refusal
from kvist.server.options import ServerOptions
from kvist.server.queueing import Depth, Load, Place, Queue, depth, predicted_wait, retry_after


@dataclass
class State:
    """A snapshot by hand."""

    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    preemptions: int = 0
    steps: int = 0
    blocks_by_state: dict[str, int] = field(default_factory=dict)
    kv_bytes: dict[str, int] = field(default_factory=dict)
    fragmentation: dict[str, float] = field(default_factory=dict)
    prompt_tokens_by_source: dict[str, int] = field(default_factory=lambda: {"computed": 0, "prefix_hit": 0})


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        (0, 0, Depth(1, 1, 10)),  # a burst into an idle engine of four seats: the fifth waits
        (4, 1, Depth(1, 1, 10)),
        (2, 3, Depth(2, 4, 30)),  # blocks are short: two run although there are four seats; the newest fill the rest
    ],
)
def test_the_newest_wait(running: int, waiting: int, expected: Depth) -> None:
    newest_first = [Place(1, 10), Place(3, 20), Place(1, 40)]
    assert depth(newest_first, 5, 4, State(running, waiting)) == expected


def test_nobody_waits_while_there_are_seats() -> None:
    assert depth([Place(4, 10)], 4, 4, State()) == Depth()


def test_the_wait_is_the_larger_share_of_what_was_done() -> None:
    assert predicted_wait(Load(100, 0), Load(50, 10), 2.0) == 4.0
    assert predicted_wait(Load(100, 30), Load(50, 10), 2.0) == 6.0
    assert predicted_wait(Load(100, 30), Load(0, 10), 2.0) == 6.0
    assert predicted_wait(Load(100, 30), Load(0, 0), 2.0) is None
    assert predicted_wait(Load(100, 30), Load(5, 5), 0.0) is None
    assert [retry_after(wait) for wait in (None, 0.0, 0.2, 1.2, 1e9)] == [1, 1, 1, 2, 600]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.001, 1e4))
def test_more_work_never_waits_less(prompt: int, answer: int, done_prompt: int, done_answer: int, seconds: float) -> None:
    done = Load(done_prompt, done_answer)
    wait = predicted_wait(Load(prompt, answer), done, seconds)
    more = predicted_wait(Load(prompt + 1, answer + 1), done, seconds)
    assert wait is not None
    assert more is not None
    assert 0 <= wait <= more
    assert 1 <= retry_after(wait) <= retry_after(more) <= 600


def queue(state: State, now: list[float], **limits: Any) -> Queue:
    given = {"max_requests": None, "max_tokens": None, **limits}
    return Queue(lambda: state, seats=1, clock=lambda: now[0], **given)


def test_places_come_back_and_the_wait_follows_the_last_minute() -> None:
    state, now = State(), [0.0]
    line = queue(state, now, max_requests=1)
    with line.place(100, 1) as running:
        running.answer_tokens = 20
        state.num_running = 1
    state.prompt_tokens_by_source["computed"], state.generated_tokens, state.step_seconds = 100, 20, 2.0
    now[0] = 10.0
    with line.place(50, 1), line.place(300, 1):
        with pytest.raises(Refusal) as refused, line.place(60, 1):
            pass
        # 360 prompt tokens at 100 in 2 s; two answers of 20 tokens at 20 in 2 s.
        assert refused.value.headers == {"retry-after": "8"}
        now[0], state.step_seconds, state.generated_tokens = 200.0, 102.0, 30
        with pytest.raises(Refusal) as refused:
            line.check()
        assert int(refused.value.headers["retry-after"]) > 8, "it became slower"
    line.check()


def test_tokens_are_limited_where_they_wait_and_only_there() -> None:
    line = queue(State(), [0.0], max_tokens=100)
    with line.place(5000, 1):
        with (
            line.place(60, 1),
            pytest.raises(Refusal, match="60 prompt tokens wait already, this prompt has 41"),
            line.place(41, 1),
        ):
            pass
        with line.place(100, 1):
            pass
        with pytest.raises(Refusal), line.place(101, 1):
            pass


def test_without_limits_everybody_may_wait() -> None:
    line = queue(State(), [0.0])
    places = [line.place(10**9, 128) for _ in range(100)]
    for place in places:
        place.__enter__()
    line.check()


def send(server: ServerThread, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    connection = server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


def test_a_full_queue_answers_429_and_lets_others_through_later() -> None:
    engine = FakeEngine(config=config(max_num_seqs=2))
    with (
        serving(engine, ServerOptions(warm_up=False, max_queued_requests=1, max_queued_tokens=100)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        engine.held(),
    ):
        running = [send(server, {"prompt": "a" * 200, "max_tokens": 2}) for _ in range(2)]
        wait_until(lambda: engine.running == 2, "both seats are taken")
        long = client.post(COMPLETIONS, json={"prompt": "a" * 100, "stream": True})
        assert error_of(long, 429)["code"] == "server_busy"
        assert "--max-queued-tokens" in long.text
        queued = send(server, {"prompt": "a" * 50, "max_tokens": 2})
        wait_until(lambda: engine.waiting == 1, "one waits")
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ):
            refused = client.post(path, json=body)
            assert error_of(refused, 429)["type"] == "rate_limit_error"
            assert "--max-queued-requests is 1" in refused.text
            assert 1 <= int(refused.headers["retry-after"]) <= 600
        assert client.get("/health").status_code == 200
        assert 'outcome="refused"' in client.get("/metrics").text
        engine.release()
        for connection in (*running, queued):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()
        wait_until(lambda: client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200, "there is room again")


@pytest.mark.parametrize("flag", ["max_queued_requests", "max_queued_tokens"])
def test_a_negative_limit_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--max-queued"):
        ServerOptions(**{flag: -1})  # type: ignore[arg-type]
