"""What is no HTTP is answered as any other mistake, and only where no answer is on its way."""

from __future__ import annotations

import json

import pytest
from server_fakes import ServerThread, fake_of


def answer_to(server: ServerThread, sent: bytes) -> bytes:
    with server.connect() as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01",  # TLS, to a server without it
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_request_gets_an_error_as_any_other(server: ServerThread, sent: bytes) -> None:
    head, _, body = answer_to(server, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == "malformed_request"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\nConnection: close", 400),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHost: a\r\nhost: a", 400),
        ("GET /health HTTP/1.0\r\nHost: a\r\nHost: b", 400),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHost: a b", 400),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHost: user@a/b", 400),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHost:", 200),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHOST: a-b_c.example:8000 ", 200),
        ("GET /health HTTP/1.1\r\nConnection: close\r\nHost: [::1]:8000", 200),
    ],
)
def test_one_host_is_named_and_no_more(server: ServerThread, head: str, status: int) -> None:
    answer, _, body = answer_to(server, f"{head}\r\n\r\n".encode()).partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 400:
        assert "one Host header" in json.loads(body)["error"]["message"]


def test_a_request_without_a_host_starts_no_work(server: ServerThread) -> None:
    body, before = b'{"prompt": "a", "max_tokens": 1}', list(fake_of(server).started)
    assert b"400" in answer_to(server, b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert fake_of(server).started == before


def test_what_is_no_request_never_lands_in_an_answer(server: ServerThread) -> None:
    body = b'{"prompt": "a", "max_tokens": 50, "ignore_eos": true, "stream": true}'
    asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with fake_of(server).held(after=1), server.connect() as connection:
        connection.sendall(asked)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\x00\r\n\r\n")
        assert b"HTTP/1.1" not in b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_body_that_is_packed_for_its_way_is_refused(server: ServerThread) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    asked = head + b"2\r\n{}\r\n0\r\n\r\n"
    head, _, body = answer_to(server, asked).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 415")
    assert "Transfer-Encoding: gzip, chunked" in json.loads(body)["error"]["message"]
