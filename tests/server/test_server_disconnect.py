"""Field case A08: a client that goes away takes its request with it, streaming or not, running, queued or in a batch of prompts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, config, fake_of, serving, wait_until
from server_sse import CHAT, COMPLETIONS

LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def small_server() -> Iterator[ServerThread]:
    with serving(FakeEngine(config=config(max_num_seqs=2, max_model_len=8192, pool_tokens=16384))) as server:
        yield server


def send(server: ServerThread, path: str, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    connection = server.connect()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw))
        + raw
    )
    return connection


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("mode", [True, False])
def test_a_running_request_is_aborted(small_server: ServerThread, path: str, mode: bool) -> None:
    engine = fake_of(small_server)
    aborted = len(engine.aborted)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    with engine.held(after=int(mode)):
        connection = send(small_server, path, {**prompt, **LONG, "max_tokens": 4000, "stream": mode})
        if mode:
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
        wait_until(lambda: engine.running == 1, "the request runs")
        connection.close()
        wait_until(lambda: engine.running == 0, "the engine is idle again, although no token came")
        assert len(engine.aborted) == aborted + 1


def test_a_queued_request_is_aborted_and_the_running_ones_go_on(small_server: ServerThread) -> None:
    engine = fake_of(small_server)
    aborted = len(engine.aborted)
    body = {"prompt": "a", "max_tokens": 5}
    with engine.held(), httpx.Client(base_url=small_server.url, timeout=30) as client:
        plain = send(small_server, COMPLETIONS, body)
        other = send(small_server, COMPLETIONS, body)
        wait_until(lambda: engine.running == 2, "both places are taken")
        queued = [send(small_server, COMPLETIONS, {**body, "stream": mode}) for mode in (True, False)]
        wait_until(lambda: engine.waiting == 2, "two requests wait")
        for connection in queued:
            connection.close()
        wait_until(lambda: engine.waiting == 0, "nobody waits")
        assert engine.running == 2
        assert len(engine.aborted) == aborted + 2
        engine.release()
        answers = [read_all(connection) for connection in (plain, other)]
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert len(engine.aborted) == aborted + 2
        assert client.get("/health").status_code == 200


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    data = b""
    while b'"usage"' not in data:
        part = connection.recv(65536)
        assert part
        data += part
    connection.close()
    return data


@pytest.mark.parametrize("mode", [True, False])
def test_all_prompts_of_a_request_are_aborted(small_server: ServerThread, mode: bool) -> None:
    engine = fake_of(small_server)
    aborted, started = len(engine.aborted), len(engine.started)
    with engine.held():
        connection = send(small_server, COMPLETIONS, {"prompt": ["a", "b", "c", "d"], **LONG, "stream": mode})
        wait_until(lambda: len(engine.started) == started + 4, "all four prompts are with the engine")
        connection.close()
        wait_until(lambda: engine.running == engine.waiting == 0, "all four are gone")
        assert len(engine.aborted) == aborted + 4


def test_rounds_of_leaving_clients_leave_nothing_behind(small_server: ServerThread) -> None:
    engine = fake_of(small_server)
    free = engine.snapshot().blocks_by_state["free"]

    for _ in range(3):
        started = len(engine.started)
        with engine.held():
            connections = [send(small_server, COMPLETIONS, {"prompt": "x" * 64, **LONG, "stream": i % 2 == 0}) for i in range(20)]
            wait_until(lambda: len(engine.started) == started + 20, "all twenty are with the engine")  # noqa: B023
            for connection in connections:
                connection.close()
            wait_until(lambda: engine.running == engine.waiting == 0, "the engine is idle")
        generated = engine.generated
        assert engine.snapshot().blocks_by_state["free"] == free
        with httpx.Client(base_url=small_server.url) as client:
            assert client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 4}).status_code == 200
        assert engine.generated == generated + 4


def test_a_client_that_sends_half_a_body_and_leaves_is_nothing(small_server: ServerThread) -> None:
    engine = fake_of(small_server)
    started = len(engine.started)
    connection = small_server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    connection.close()
    with httpx.Client(base_url=small_server.url) as client:
        assert client.get("/health").status_code == 200
    assert len(engine.started) == started
