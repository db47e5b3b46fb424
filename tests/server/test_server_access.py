"""What stands around the routes: request ids, access lines without secrets, CORS, root paths, limits and salts by key."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, fake_of, serving, wait_until
from server_sse import CHAT, COMPLETIONS, error_of

from kvist.errors import ConfigError
from kvist.server.keys import make_key
from kvist.server.logs import BackgroundHandler, JsonFormatter, TextFormatter
from kvist.server.options import ServerOptions

ORIGIN = "https://chat.example.org"
SECRET = "sk-very-secret-key"
BODY = {"prompt": "a private matter", "max_tokens": 3}


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice {SECRET}\nbob k2\n")
    options = ServerOptions(
        api_key_file=file, max_requests_per_key=2, cors_origins=(ORIGIN,), root_path="/llm", max_body_bytes=4096, warm_up=False
    )
    with serving(FakeEngine(), options) as server:
        yield server


@pytest.fixture
def alice(keyed_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed_server.url, timeout=30, headers={"authorization": f"Bearer {SECRET}"}) as client:
        yield client


@pytest.fixture(autouse=True)
def all_lines_written(shared_server: ServerThread, keyed_server: ServerThread) -> Iterator[None]:
    """A client has its answer before the server has written the line: none of this test's may come in the next one."""
    yield
    wait_until(
        lambda: not any(server.app.state.kvist.life.open_requests for server in (shared_server, keyed_server)), "all is said"
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "kvist.access"]


def wait_for_lines(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, object]]:
    wait_until(lambda: len(lines(caplog)) >= count, "the access lines are there")
    assert len(lines(caplog)) == count
    return lines(caplog)


def test_a_plain_request_id_comes_back_and_another_is_replaced(alice: httpx.Client) -> None:
    for given in ("abc-123_.:/+=@", "x" * 128):
        assert alice.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] == given
    fresh = {
        alice.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"]
        for given in ("", "a b", "x" * 129, "a\tb", 'a"b')
    }
    assert {len(value) for value in fresh} == {32}
    assert len(fresh) == 5


def test_every_answer_has_a_request_id(keyed_server: ServerThread, alice: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    answers = [
        alice.get("/nowhere"),
        httpx.get(f"{keyed_server.url}/v1/models"),
        alice.post(COMPLETIONS, content=b"x" * 5000),
        alice.post(COMPLETIONS, json=BODY | {"stream": True}),
    ]
    monkeypatch.setattr(fake_of(keyed_server), "encode", broken)
    answers.append(alice.post(COMPLETIONS, json=BODY))
    assert [answer.status_code for answer in answers] == [404, 401, 413, 200, 500]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 5


@pytest.mark.parametrize("mode", [True, False])
def test_an_access_line_has_counts_and_times(alice: httpx.Client, caplog: pytest.LogCaptureFixture, mode: bool) -> None:
    with caplog.at_level(logging.INFO, "kvist.access"):
        assert alice.post(COMPLETIONS, json=BODY | {"stream": mode}, headers={"x-request-id": "r1"}).status_code == 200
        (line,) = wait_for_lines(caplog, 1)
    expected = {
        "level": "info",
        "method": "POST",
        "route": COMPLETIONS,
        "status": 200,
        "id": "r1",
        "key": "alice",
        "client": "127.0.0.1",
        "outcome": "completed",
        "prompt_tokens": 17,
        "completion_tokens": 3,
    }
    assert expected.items() <= line.items()
    assert {"time", "queue_s", "ttft_s", "total_s", "cached_tokens"} <= line.keys()


def test_a_line_of_text_says_each_thing_once() -> None:
    """Also a count that equals the status, which is another thing."""
    fields = {"method": "POST", "route": "/x", "status": 200, "id": "r", "completion_tokens": 200}
    message = "%(method)s %(route)s %(status)s"
    record = logging.makeLogRecord({"name": "kvist.access", "levelname": "INFO", "msg": message, "args": fields})
    assert TextFormatter().format(record) == "INFO kvist.access: POST /x 200"
    record.fields = fields
    assert TextFormatter().format(record) == "INFO kvist.access: POST /x 200 id=r completion_tokens=200"
    assert json.loads(JsonFormatter().format(record))["message"] == "POST /x 200"


def test_looking_is_logged_at_debug_and_refusals_at_info(
    keyed_server: ServerThread, alice: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvist.access"):
        assert alice.get("/health").status_code == 200
        assert alice.get("/v1/models/none").status_code == 404
        assert alice.get("/no%0Awhere%20").status_code == 404
        assert httpx.post(keyed_server.url + CHAT, json={}).status_code == 401
        found = wait_for_lines(caplog, 3)
    assert [(line["route"], line["status"], line.get("key")) for line in found] == [
        ("/v1/models/{name:path}", 404, "alice"),
        ("/no\\nwhere%20", 404, "alice"),
        (CHAT, 401, None),
    ]
    assert {line["outcome"] for line in found} == {"refused"}


def test_no_log_line_holds_a_prompt_an_answer_or_a_key(
    keyed_server: ServerThread, alice: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG, "kvist"):
        answer = alice.post(COMPLETIONS, json=BODY | {"max_tokens": 12}).json()["choices"][0]["text"]
        alice.post(CHAT, json={"messages": [{"role": "user", "content": BODY["prompt"]}], "stream": True})
        alice.post(COMPLETIONS, json=BODY | {"temperature": -1})
        alice.get(f"/v1/models?api_key={SECRET}")
        httpx.get(f"{keyed_server.url}/v1/models", headers={"authorization": "Bearer wrong-but-private"})
        monkeypatch.setattr(fake_of(keyed_server), "fail_after", 1)
        alice.post(COMPLETIONS, json=BODY)
        found = wait_for_lines(caplog, 6)
    # The client's own library logs too, where another test has asked for it.
    own = [TextFormatter().format(record) for record in caplog.records if record.name.startswith("kvist")]
    written = "\n".join([*map(json.dumps, found), *own])
    assert "alice" in written
    for secret in (SECRET, str(BODY["prompt"]), answer, "private"):
        assert secret not in written


def test_a_client_that_leaves_is_a_line_with_499(keyed_server: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_of(keyed_server)
    with caplog.at_level(logging.INFO, "kvist.access"), engine.held():
        connection = keyed_server.connect()
        raw = json.dumps(BODY).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k2\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        wait_until(lambda: engine.running == 1, "it runs")
        connection.close()
        (line,) = wait_for_lines(caplog, 1)
    assert (line["status"], line["outcome"], line["key"]) == (499, "aborted", "bob")


def test_a_key_has_its_limit_and_others_have_theirs(keyed_server: ServerThread, alice: httpx.Client) -> None:
    engine = fake_of(keyed_server)
    started = len(engine.started)
    with engine.held():
        connections = []
        for _ in range(2):
            raw = json.dumps(BODY).encode()
            connection = keyed_server.connect()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            connections.append(connection)
        wait_until(lambda: len(engine.started) == started + 2, "both are with the engine")
        refused = alice.post(COMPLETIONS, json=BODY)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        assert SECRET not in refused.text
        assert alice.get("/v1/models").status_code == 200
        connections[0].close()
        wait_until(lambda: engine.running == 1, "one has left")
    wait_until(lambda: alice.post(COMPLETIONS, json=BODY).status_code == 200, "there is room again")
    connections[1].close()
    with httpx.Client(base_url=keyed_server.url, headers={"authorization": "Bearer k2"}) as bob:
        assert bob.post(COMPLETIONS, json=BODY).status_code == 200


def test_keys_have_salts_of_their_own(keyed_server: ServerThread, alice: httpx.Client) -> None:
    salts = fake_of(keyed_server).salts
    start = len(salts)
    for key in (SECRET, "k2"):
        for own in (None, "x"):
            alice.post(COMPLETIONS, json=BODY | {"cache_salt": own}, headers={"authorization": f"Bearer {key}"})
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "cache_salt": own}
            alice.post(CHAT, json=chat, headers={"authorization": f"Bearer {key}"})
    expected = [make_key(key).salt(own) for key in (SECRET, "k2") for own in ("", "x") for _ in range(2)]
    assert salts[start:] == expected
    assert len(set(expected)) == 4


def test_without_isolation_the_clients_salt_is_all_there_is() -> None:
    engine = FakeEngine()
    with serving(engine, ServerOptions(api_keys=("k1", "k2"), key_isolation=False, warm_up=False)) as server:
        for key in ("k1", "k2"):
            for own in (None, "x"):
                body = BODY | {"cache_salt": own}
                assert (
                    httpx.post(server.url + COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200
                )
    assert engine.salts == ["", "x", "", "x"]


@pytest.mark.parametrize(
    ("trusted", "client"), [(("127.0.0.1",), "203.0.113.9"), (("10.0.0.0/8",), "127.0.0.1"), ((), "127.0.0.1")]
)
def test_a_proxy_is_believed_only_where_it_is_known(
    trusted: tuple[str, ...], client: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(FakeEngine(), ServerOptions(forwarded_allow_ips=trusted, warm_up=False)) as server,
        caplog.at_level(logging.INFO, "kvist.access"),
    ):
        headers = {"x-forwarded-for": "198.51.100.1, 203.0.113.9"}
        assert httpx.post(server.url + COMPLETIONS, json=BODY, headers=headers).status_code == 200
        (line,) = wait_for_lines(caplog, 1)
    assert line["client"] == client


def test_pages_of_the_origin_may_call_and_no_others(keyed_server: ServerThread, alice: httpx.Client) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type,x-stainless-os"}
    allowed = httpx.options(keyed_server.url + CHAT, headers={"origin": ORIGIN, **ask})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert httpx.options(keyed_server.url + CHAT, headers={"origin": "https://evil.example", **ask}).status_code == 400
    answer = alice.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    refused = httpx.get(keyed_server.url + "/v1/models", headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN), "a page can read the refusal"


def test_without_the_flag_there_is_no_cors(client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert client.options(CHAT, headers={"origin": ORIGIN, "access-control-request-method": "POST"}).status_code == 405


def test_a_root_path_may_be_there_or_not_and_opens_nothing(keyed_server: ServerThread, alice: httpx.Client) -> None:
    for path in ("/v1/models", "/llm/v1/models"):
        assert alice.get(path).status_code == 200
        assert httpx.get(keyed_server.url + path).status_code == 401
    for path in ("/health", "/llm/health", "/llm/ready"):
        assert httpx.get(keyed_server.url + path).status_code == 200
    for path in (
        "/llm/llm/health",
        "/llmhealth",
        "/llm//health",
        "/llm/health/",
        "/HEALTH",
        "/health;x",
        "/./health",
        "/llm/../health",
    ):
        connection = keyed_server.connect()
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401"), path
        connection.close()


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"max_requests_per_key": 3}, "--max-requests-per-key"),
        ({"api_keys": ("k",), "max_requests_per_key": 0}, "--max-requests-per-key"),
        ({"max_body_bytes": 5}, "--max-body-size"),
        ({"cors_origins": ("example.org",)}, "--cors-origin"),
        ({"cors_origins": ("https://example.org/",)}, "--cors-origin"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/llm/"}, "--root-path"),
        ({"forwarded_allow_ips": ("proxy",)}, "--forwarded-allow-ips"),
        ({"stream_timeout": float("nan")}, "--stream-timeout"),
    ],
)
def test_what_cannot_be_names_its_flag(fields: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServerOptions(**fields)  # type: ignore[arg-type]


def test_whoever_logs_never_waits_for_the_reader_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[str] = []
            self.free = False

        def handle(self, record: logging.LogRecord) -> bool:
            wait_until(lambda: self.free, "the reader goes on")
            self.written.append(record.getMessage())
            return True

    stuck = Stuck()
    handler = BackgroundHandler(stuck, size=4)
    for i in range(100):
        handler.emit(logging.makeLogRecord({"msg": f"line {i}"}))
    assert stuck.written == []
    stuck.free = True
    wait_until(lambda: "lost" in "".join(stuck.written), "the loss is told")
    handler.close()
    kept = len(stuck.written) - 1
    assert stuck.written.count(f"{100 - kept} log lines were lost.") == 1
    assert 4 <= kept <= 5
