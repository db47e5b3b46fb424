"""Field case A20 and what stands before any route: keys, body sizes, health, models and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, fake_of, serving
from server_sse import CHAT, COMPLETIONS, error_of

from kvist.server.options import ServerOptions

LIMIT = 300_000


@pytest.fixture(scope="module")
def locked_server() -> Iterator[ServerThread]:
    options = ServerOptions(api_keys=("k1", "k2"), served_model_names=("one", "two/b"), max_body_bytes=LIMIT)
    with serving(FakeEngine(), options) as server:
        yield server


@pytest.fixture
def locked(locked_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked_server.url, timeout=30) as client:
        yield client


def routes(server: ServerThread) -> list[tuple[str, str]]:
    found = [(method, route) for route, methods in server.app.openapi()["paths"].items() for method in methods]
    assert {path for _, path in found} >= {CHAT, COMPLETIONS, "/v1/models", "/metrics", "/version", "/ready", "/health"}
    return [*found, ("get", "/openapi.json"), ("get", "/docs"), ("get", "/nowhere")]


@pytest.mark.parametrize(
    "spelling", ["{}", "/{}", "{}/", "{}//", "/v1{}", "{};x", "{}%20", "{}?api_key=k1", "{}?Authorization=Bearer%20k1"]
)
def test_every_route_but_the_health_routes_wants_a_key(locked_server: ServerThread, locked: httpx.Client, spelling: str) -> None:
    for method, path in routes(locked_server):
        target = spelling.format(path)
        if target.split("?")[0] in ("/health", "/ready"):
            continue
        for headers in (
            {},
            {"authorization": "Bearer k1x"},
            {"authorization": "Bearer"},
            {"authorization": "k1"},
            {"authorization": "Basic k1"},
        ):
            url = locked_server.url + target
            error = error_of(locked.request(method, url, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
            assert "k1x" not in error["message"]


def test_both_keys_open_and_health_needs_none(locked: httpx.Client) -> None:
    assert locked.get("/health").json() == {"status": "ok"}
    for header in ("Bearer k1", "Bearer k2", "bearer k2", "Bearer  k1"):
        assert locked.get("/v1/models", headers={"authorization": header}).status_code == 200
    response = locked.get("/v1/models")
    assert response.headers["www-authenticate"] == "Bearer"


def test_without_keys_no_header_is_needed_and_any_is_fine(client: httpx.Client) -> None:
    assert client.get("/v1/models").status_code == 200
    assert client.get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_aliases(locked: httpx.Client) -> None:
    locked.headers["authorization"] = "Bearer k1"
    models = locked.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in models["data"]] == [
        ("one", "model", 512),
        ("two/b", "model", 512),
    ]
    assert locked.get("/v1/models/two/b").json()["id"] == "two/b"
    assert error_of(locked.get("/v1/models/three"), 404)["code"] == "model_not_found"
    for name in ("one", "two/b"):
        assert locked.post(COMPLETIONS, json={"model": name, "prompt": "a"}).json()["model"] == name
    assert error_of(locked.post(COMPLETIONS, json={"model": "fake", "prompt": "a"}), 404)["code"] == "model_not_found"


def padded(size: int) -> bytes:
    """A good request of exactly `size` bytes."""
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    return body[:-2] + b"u" * (size - len(body)) + body[-2:]


def test_the_body_limit_is_exact(locked: httpx.Client) -> None:
    locked.headers["authorization"] = "Bearer k1"
    assert locked.post(COMPLETIONS, content=padded(LIMIT)).status_code == 200
    assert locked.post(COMPLETIONS, content=iter([padded(LIMIT)])).status_code == 200
    for content in (padded(LIMIT + 1), iter([padded(LIMIT + 1)]), iter([b" " * 65536] * 100)):
        response = locked.post(COMPLETIONS, content=content)
        assert error_of(response, 413)["code"] == "request_too_large"
    assert locked.get("/health").status_code == 200


def test_a_client_that_asks_first_is_told_before_it_sends(locked_server: ServerThread) -> None:
    connection = locked_server.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k1\r\n"
        b"Content-Length: 200000000\r\nExpect: 100-continue\r\n\r\n"
    )
    answer = b""
    while part := connection.recv(65536):
        answer += part
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in answer


def test_health_ready_and_version(server: ServerThread, client: httpx.Client) -> None:
    engine = fake_of(server)
    assert client.get("/ready").status_code == 200
    version = client.get("/version").json()
    assert (version["profile"], version["model"], version["max_model_len"]) == ("fake-profile", "fake", 512)
    engine.health = "The engine stopped on an internal error."
    try:
        assert client.get("/ready").status_code == 503
        response = client.get("/health")
        assert (response.status_code, response.json()["reason"]) == (503, "The engine stopped on an internal error.")
    finally:
        engine.health = None
    assert client.get("/health").status_code == 200


def test_a_bug_answers_500_without_its_inside(server: ServerThread, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(fake_of(server), "encode", broken)
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a"}), 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]


def test_a_stopped_engine_answers_503() -> None:
    engine = FakeEngine()
    with serving(engine) as server, httpx.Client(base_url=server.url) as client:
        engine._stopped = True
        for mode in (True, False):
            error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "stream": mode}), 503)
            assert error["code"] == "engine_stopped"


def test_openapi_describes_the_request_bodies(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, name, fields in [(CHAT, "ChatRequest", {"messages", "user"}), (COMPLETIONS, "CompletionRequest", {"prompt", "echo"})]:
        body = document["paths"][path]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert fields | {"temperature", "stream_options", "tools"} <= set(schemas[name]["properties"])
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert set(schemas["StreamOptions"]["properties"]) == {"include_usage", "continuous_usage_stats", "include_obfuscation"}


def test_head_tells_what_get_would_without_its_body(locked: httpx.Client) -> None:
    assert locked.head("/health").status_code == 200
    assert locked.head("/v1/models").status_code == 401
    headers = {"authorization": "Bearer k1"}
    for path in ("/v1/models", "/openapi.json", "/nowhere", CHAT):
        asked, got = locked.head(path, headers=headers), locked.get(path, headers=headers)
        assert (asked.status_code, asked.content) == (got.status_code, b"")
        assert asked.headers["content-length"] == str(len(got.content)), path
