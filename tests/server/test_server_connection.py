"""Clients that hold a connection without asking or reading: each is let go, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, config, fake_of, serving, wait_until
from server_sse import COMPLETIONS, stream, text_of

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.errors import InvalidRequestError
from kvist.server import body as bodies
from kvist.server.body import parse
from kvist.server.connection import connection_class
from kvist.server.options import ServerOptions


@pytest.fixture(scope="module")
def plain_server() -> Iterator[ServerThread]:
    with serving(FakeEngine()) as server:
        yield server


@pytest.fixture(scope="module")
def small_server() -> Iterator[ServerThread]:
    """It has few connections, and no patience with readers."""
    engine = FakeEngine(config=config(max_model_len=100_000, pool_tokens=200_000))
    with serving(engine, ServerOptions(warm_up=False, stream_timeout=1, max_connections=6, max_body_bytes=2048)) as server:
        yield server


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a reset is an end too."""
    data = b""
    with contextlib.suppress(ConnectionResetError), connection:
        while part := connection.recv(65536):
            data += part
    return data


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    raw = b"" if body is None else json.dumps(body).encode()
    return f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def ask_health(connection: socket.socket) -> None:
    connection.sendall(request("/health"))
    answer = b""
    while b"}" not in answer:
        answer += connection.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_end_is_not_waited_for(plain_server: ServerThread, sent: bytes) -> None:
    with plain_server.head_seconds(0.05):
        connection = plain_server.connect()
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_second_head_has_the_same_limit(plain_server: ServerThread) -> None:
    connection = plain_server.connect()
    ask_health(connection)
    with plain_server.head_seconds(0.05):
        connection.sendall(b"GET /he")
        assert rest(connection) == b""


def test_a_head_that_comes_byte_by_byte_has_the_same_limit(plain_server: ServerThread) -> None:
    with plain_server.head_seconds(0.05), plain_server.connect() as connection, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rest, connection)
        pause = threading.Event()
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
            while not answer.done():
                connection.sendall(b"x")
                pause.wait(0.01)
        assert answer.result().startswith(b"HTTP/1.1 408")


def test_a_body_that_nobody_waits_for_holds_nothing(plain_server: ServerThread) -> None:
    connection = plain_server.connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    with plain_server.head_seconds(0.05):
        connection.sendall(b"x")
        assert b"408" not in rest(connection)


def test_a_request_that_is_answered_for_long_is_not_late(plain_server: ServerThread) -> None:
    """Its own head, begun under the same limit, has come; of another, begun after it, the time is up meanwhile."""
    engine = fake_of(plain_server)
    with engine.held(), plain_server.head_seconds(0.5), plain_server.connect() as connection:
        connection.sendall(request(COMPLETIONS, {"prompt": "a", "max_tokens": 3}))
        wait_until(lambda: engine.running == 1, "it runs")
        assert rest(plain_server.connect()).startswith(b"HTTP/1.1 408")
        engine.release()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def silent_reader(server: ServerThread, body: dict[str, Any]) -> socket.socket:
    """A client with a small window that asks and never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request(COMPLETIONS, body))
    return connection


@pytest.mark.parametrize("mode", [True, False])
def test_a_reader_that_reads_nothing_is_dropped(small_server: ServerThread, mode: bool) -> None:
    engine = fake_of(small_server)
    aborted, generated = len(engine.aborted), engine.generated
    body = {"prompt": "a", "max_tokens": 6000, "ignore_eos": True, "stream": mode, "logprobs": 5}
    connection = silent_reader(small_server, body)
    wait_until(lambda: engine.generated > generated, "it runs")
    wait_until(lambda: not alive(small_server, connection), "the connection is gone")
    wait_until(lambda: engine.running == 0, "and its request with it")
    assert len(engine.aborted) == aborted + mode, "a whole answer was complete before anybody had to read it"
    connection.close()


def alive(server: ServerThread, connection: socket.socket) -> bool:
    own = connection.getsockname()
    return any(other.client == own for other in server.connections())


@dataclass
class Reader:
    """The transport and the clock of one connection, by hand."""

    waiting: int
    aborted: bool = False
    timers: list[Callable[[], None]] = field(default_factory=list)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, seconds: float, callback: Callable[[], None]) -> SimpleNamespace:
        assert seconds == 60
        self.timers.append(callback)
        return SimpleNamespace(cancel=lambda: self.timers.remove(callback))


def test_a_slow_reader_that_reads_on_is_kept() -> None:
    """At each look something must have been taken since the last one; a reader that took all has no timer."""
    connection: Any = object.__new__(connection_class(ServerOptions(stream_timeout=60)))
    reader = connection.transport = connection.loop = Reader(1000)
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    connection.pause_writing()
    for waiting in (999, 500, 499):
        reader.waiting = waiting
        (look,) = reader.timers
        reader.timers.clear()
        look()
        assert not reader.aborted
    connection.resume_writing()
    assert not reader.timers
    connection.pause_writing()
    (look,) = reader.timers
    look()
    assert reader.aborted


def test_idle_connections_make_room_for_new_ones(small_server: ServerThread) -> None:
    engine = fake_of(small_server)
    wait_until(lambda: len(small_server.connections()) == 0, "all connections of before are gone")
    with engine.held(), contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(small_server.connect())

        working = [connect() for _ in range(4)]
        for connection in working:
            connection.sendall(request(COMPLETIONS, {"prompt": "a", "max_tokens": 3}))
        wait_until(lambda: engine.running == 4, "four are at work")
        idle = [connect() for _ in range(2)]
        for connection in idle:
            ask_health(connection)
        ask_health(connect())
        assert idle[0].recv(1000) == b"", "the one that was idle longest had to go"
        more = [connect() for _ in range(2)]
        for connection in more:
            connection.sendall(request(COMPLETIONS, {"prompt": "a", "max_tokens": 3}))
        wait_until(lambda: engine.running == 6, "all are at work")
        assert rest(connect()).startswith(b"HTTP/1.1 503")
        engine.release()
        for connection in (*working, *more):
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_of_connections_that_were_active_in_one_moment_the_first_makes_room(small_server: ServerThread) -> None:
    """The loop's clock need not have moved between them; the first to be idle has to go, each time."""
    for _ in range(30):
        wait_until(lambda: len(small_server.connections()) == 0, "all connections of before are gone")
        with contextlib.ExitStack() as opened:
            connections = [opened.enter_context(small_server.connect()) for _ in range(6)]
            for connection in reversed(connections):
                ask_health(connection)
            ask_health(opened.enter_context(small_server.connect()))
            assert rest(connections[-1]) == b"", "the one that asked first"
            ask_health(connections[0])


def test_a_silent_reader_slows_nobody_and_costs_no_blocks() -> None:
    """On the real engine, which goes on generating for it: the text waits merged, the request ends, the others have their texts."""
    engine = AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=256))
    body = {"prompt": "hello the win", "temperature": 1, "seed": 5, "max_tokens": 60, "ignore_eos": True}
    with (
        serving(engine, ServerOptions(warm_up=False, stream_timeout=1)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        plain = text_of(stream(client, COMPLETIONS, body))
        wide = body | {"max_tokens": 400, "n": 8, "logprobs": 5, "stream": True}
        silent = [silent_reader(server, wide) for _ in range(2)]
        wait_until(lambda: engine.snapshot().generated_tokens > 2 * 60, "the silent ones run")
        for _ in range(5):
            assert text_of(stream(client, COMPLETIONS, body)) == plain
            assert client.get("/health").status_code == 200
        wait_until(lambda: engine.snapshot().num_running == 0, "their requests end without a reader")
        wait_until(lambda: not any(alive(server, connection) for connection in silent), "and they are dropped")
        assert engine.snapshot().blocks_by_state["live"] == 0
        ended = 'kvist:requests_total{outcome="aborted",route="completions"} 2.0'
        wait_until(lambda: ended in client.get("/metrics").text, "what nobody took is not counted as completed")
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("beginning", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_does_not_end_is_not_waited_for(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.2)
    with serving(FakeEngine()) as server:
        connection = server.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + beginning)
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"timeout"' in answer
        assert not fake_of(server).started


@pytest.mark.parametrize("declared", [b"Content-Length: 200000000", b"Transfer-Encoding: chunked"])
def test_an_oversized_body_is_refused_long_before_its_end(small_server: ServerThread, declared: bytes) -> None:
    connection = small_server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + declared + b"\r\n\r\n")
    piece = b"4000\r\n" + b"x" * 0x4000 + b"\r\n" if b"chunked" in declared else b"x" * 0x4000
    sent, pause = 0, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rest, connection)
        with contextlib.suppress(OSError):
            while not answer.done():
                connection.sendall(piece)
                sent += len(piece)
                pause.wait(0.002)
        assert answer.result().startswith(b"HTTP/1.1 413")
    assert sent < 200_000_000
    assert httpx.get(f"{small_server.url}/health").status_code == 200


def test_a_body_longer_than_it_says_is_no_body_of_the_next_request(small_server: ServerThread) -> None:
    connection = small_server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" + b"x" * 100_000)
    answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"200" not in answer


def test_tens_of_thousands_of_brackets_are_refused() -> None:
    with serving(FakeEngine()) as server:
        for raw in (b"[" * 90_000, b'{"prompt":' + b"[" * 90_000 + b"]" * 90_000 + b"}", b'{"a":' * 40_000):
            response = httpx.post(server.url + COMPLETIONS, content=raw)
            assert response.status_code == 400
            assert "nests deeper" in response.text


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"prompt":[' + b"[]," * 100_001 + b"[]]}", "arrays"),
        (b'{"prompt":[' + b"1," * 250_001 + b"1]}", "values"),
        (b'{"prompt":"a"' + b',"":0' * 100_000 + b"}", "members"),
    ],
)
def test_what_is_small_to_send_and_large_to_parse_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"holds more than .*{what}"):
        parse(raw)
    text = raw.replace(b'"', b"'")
    assert parse(b'{"prompt":"' + text + b'"}') == {"prompt": text.decode()}, "in a string they are text"


def flood(connection: socket.socket, pieces: Iterator[bytes]) -> tuple[int, bytes]:
    """Sends until the server closes; how much went out, and what came back."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    return sent, rest(connection)


@pytest.mark.parametrize(
    ("begin", "piece", "answer"),
    [
        (b"GET /", b"a" * 1000, b"HTTP/1.1 431"),
        (b"GET /health HTTP/1.1\r\n", b"a" * 1000, b"HTTP/1.1 431"),
        (b"GET /health HTTP/1.1\r\nX: ", b"a" * 1000, b"HTTP/1.1 431"),
        (b"GET /health HTTP/1.1\r\n", b"X: a\r\n" * 100, b"HTTP/1.1 431"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;x=", b"a" * 1000, b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"X: a\r\n" * 100, b""),
    ],
)
def test_what_is_no_body_has_a_limit(begin: bytes, piece: bytes, answer: bytes) -> None:
    """Well before the time for a head is over: what is sent counts, not how long it takes."""
    with serving(FakeEngine()) as server, server.head_seconds(600):
        connection = server.connect()
        connection.sendall(begin)
        sent, answered = flood(connection, iter(lambda: piece, None))
        assert sent < 10_000_000
        assert answered.startswith(answer)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_head_below_the_limit_is_taken_and_so_is_a_body_in_tiny_chunks(server: ServerThread) -> None:
    headers = {f"X-{i}": "a" * 1000 for i in range(50)}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    body = json.dumps({"prompt": "a" * 100, "max_tokens": 1, "metadata": {"pad": "a" * 20_000}}).encode()
    tiny = (body[i : i + 1] for i in range(len(body)))
    assert httpx.post(server.url + COMPLETIONS, content=tiny).status_code == 200


def test_requests_sent_ahead_are_answered_in_their_order_and_bounded(server: ServerThread) -> None:
    connection = server.connect()
    asked: list[dict[str, Any]] = [{"prompt": f"twig {i}", "max_tokens": 200} for i in range(10)]
    plain = [httpx.post(server.url + COMPLETIONS, json=body).json()["choices"][0]["text"] for body in asked]
    connection.sendall(
        b"".join(request(COMPLETIONS, body) for body in asked) + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    answers = rest(connection).split(b"HTTP/1.1 200 OK")[1:]
    texts = [json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] for answer in answers[:-1]]
    assert texts == plain
    assert b'"ok"' in answers[-1]
    many = server.connect()
    sent, _ = flood(many, iter(lambda: b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, None))
    assert sent < 10_000_000


def test_a_client_that_leaves_with_a_request_sent_ahead_stops_the_one_that_runs(server: ServerThread) -> None:
    engine = fake_of(server)
    started = len(engine.started)
    connection = server.connect()
    long = request(COMPLETIONS, {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True})
    with engine.held():
        connection.sendall(long + request(COMPLETIONS, {"prompt": "b", "max_tokens": 3}))
        wait_until(lambda: engine.running == 1, "the first runs")
        connection.close()
        wait_until(lambda: engine.running == 0, "it is aborted, though it is held")
    assert engine.aborted[-1] == engine.started[-1]
    assert len(engine.started) == started + 1, "the second never began"


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
@pytest.mark.parametrize("size", [10, 50_000])
def test_a_wish_for_another_protocol_is_ignored_and_loses_no_body(server: ServerThread, name: bytes, size: int) -> None:
    """Java's HTTP client and `curl --http2` express it at each request."""
    body = {"prompt": "upgrade: a\nupgrade: b", "max_tokens": 3, "metadata": {"pad": "x" * size}}
    wish = b"HTTP/1.1\r\n" + name + b": h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n"
    connection = server.connect()
    for _ in range(2):
        connection.sendall(request(COMPLETIONS, body).replace(b"HTTP/1.1\r\n", wish, 1))
        answer = b""
        while b"}]" not in answer and b"error" not in answer:
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        assert fake_of(server).prompts[-1] == FakeEngine().tokenizer.encode("upgrade: a\nupgrade: b")
    connection.close()
