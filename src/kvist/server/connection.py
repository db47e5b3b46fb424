"""One client's connection: uvicorn's protocol, with an end to every way of holding it without asking or reading anything.

Knows transports and timers, no routes; what is refused here has the body of any other refusal. Three things are bounded in time: a
request's head (from the first of its bytes, or from the connection's begin), what the client leaves unread (while nothing of it
is taken), and, by uvicorn, the pause between two requests. Bodies have their own limit (`server/body.py`). What is not body (a
request's line and headers, and what frames a chunked body) and the requests that are sent ahead, before an answer to the one in
front, are bounded in size: the parser has no limits, and puts together long names in quadratic time. The number of connections is
bounded too: a new one takes the place of the one that was idle longest, or is refused where all are at work. A count says which one
that is: the loop's clock stands still for a millisecond, in which many come and go.

Invariants: at most one timer of each kind a connection; when a connection is lost, each of its requests is told.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import weakref
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from itertools import count
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvist.server.failures import Refusal, error_body
from kvist.server.options import ServerOptions

CONNECTION = "kvist.connection"
"""Where a request's scope has its connection."""
HEAD_SECONDS = 20.0
HEAD_BYTES = 64 * 1024
"""Of a request, all but its body."""
FRAMES = 8
"""Bytes that may frame each byte of a chunked body."""
REQUESTS_AHEAD = 64
PIECE_BYTES = 16 * 1024
"""The parser gets no more at once, and the limits are looked at after each: they are passed by no more than this."""
UNSENT_BYTES = 64 * 1024
"""What the system keeps for a client beyond what is on its way."""
PROBE_SECONDS = 60
"""A silent connection is probed after this long, so that a client that vanished without a word is noticed."""

_HOST = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)
_UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)


def _answer(refusal: Refusal) -> bytes:
    """A whole answer, after which the connection is closed: no route has a part in it."""
    body = json.dumps(error_body(refusal)).encode("ascii")
    own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**own, **(refusal.headers or {})}.items()]
    return "\r\n".join([f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}", *lines, "", ""]).encode("ascii") + body


_MALFORMED = _answer(Refusal(400, "What was sent is not a request in HTTP/1.1.", code="malformed_request"))
_NO_HOST = _answer(Refusal(400, "The request needs one Host header, which names a host.", code="malformed_request"))
_LATE = _answer(Refusal(408, "The request's head did not arrive in time.", code="timeout"))
_LARGE = _answer(Refusal(431, f"The request's head is larger than {HEAD_BYTES} bytes.", code="head_too_large"))
_FULL = _answer(Refusal(503, "All connections are in use; ask again later.", code="server_busy", headers={"retry-after": "1"}))


class Connection(HttpToolsProtocol):
    """What a class made by `connection_class` adds to uvicorn's; its settings are the class's attributes."""

    head_seconds = HEAD_SECONDS
    stream_seconds: float
    max_connections: int
    turns: Iterator[int]
    """Shared by all: each sign of life takes the next number."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _unread = 0
    _last_active = 0
    _answered: RequestResponseCycle | None = None
    """The request that is being answered, or was last; `cycle` is the one that was read last."""
    open_answer: Mapping[str, Any] | None = None
    """The scope of which `can_write_piece` is known; whatever changes that, takes it away."""
    _body_bytes = 0
    _other_bytes = 0
    """Of the request that is being read, body and all else."""
    _in_head = True
    _complaint = _MALFORMED
    """The answer to what the parser, or a look at the head, refuses."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asked for its class: uvloop's transports have none of asyncio's.
        transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        # A buffer limit of nothing: whatever the client has not taken counts as unread, and no answer piles up here.
        transport.set_write_buffer_limits(high=0)
        _set_up(transport.get_extra_info("socket"))
        self._last_active = next(self.turns)
        if len(self.connections) > self.max_connections:
            self._make_room()
        self._await_head()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            self._read(data[start : start + PIECE_BYTES])

    def _read(self, piece: bytes) -> None:
        if self._in_head:
            piece = _without_upgrade(piece)
        before, body_bytes = self.cycle, self._body_bytes
        self._last_active = next(self.turns)
        super().data_received(piece)
        if self.transport.is_closing():
            return
        if self.cycle is not before:
            self._forget_head()
        elif self._is_idle:
            self._await_head()
        # Where the piece begins another request, counts began anew and this is too much by a piece at most.
        self._other_bytes += len(piece) - max(0, self._body_bytes - body_bytes)
        if len(self.pipeline) > REQUESTS_AHEAD:
            self.transport.abort()
        elif self._other_bytes > HEAD_BYTES + FRAMES * self._body_bytes:
            self._refuse(_LARGE)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer where its parser, or what it calls, raises."""
        self._refuse(self._complaint)

    def on_message_begin(self) -> None:
        self._body_bytes = self._other_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if not _names_host(self.headers, self.parser.get_http_version()):
            self._complaint = _NO_HOST
            raise ValueError("no host")
        last = self.cycle
        self._in_head = False
        super().on_headers_complete()
        if self.cycle is not last:
            # Weak, for the connection has the scope.
            self.cycle.scope[CONNECTION] = weakref.ref(self)  # type: ignore[literal-required]
        if self.cycle is not last and self.cycle not in (cycle for cycle, _ in self.pipeline):
            self._answered = self.cycle

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def can_write_piece(self, scope: Scope) -> bool:
        """Whether `scope`'s answer is on its way, in chunks, and the client has taken all of it so far."""
        return self.open_answer is scope or self._opens(scope)

    def _opens(self, scope: Scope) -> bool:
        cycle = self._answered
        if cycle is None or cycle.scope is not scope or cycle.chunked_encoding is not True:
            return False
        if cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        self.open_answer = scope
        return True

    def write_piece(self, piece: str) -> None:
        """A piece, ASCII, of the answer that `can_write_piece` was asked about: as ASGI's `send` would, without the way there."""
        self.transport.write(f"{len(piece):x}\r\n{piece}\r\n".encode("ascii"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_answer = None
        self._forget_head()
        self._forget_unread()
        super().connection_lost(exc)
        # uvicorn tells the request that was read last, which is not the one that works where others were sent ahead.
        for cycle in (self._answered, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def pause_writing(self) -> None:
        self.open_answer = None
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def on_response_complete(self) -> None:
        self.open_answer = None
        self._last_active = next(self.turns)
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    @property
    def _is_idle(self) -> bool:
        """No request is being answered."""
        return self._answered is None or self._answered.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self._is_idle and not self.transport.is_closing():
            if self._answered is None:
                self.transport.write(_LATE)
            self.transport.close()

    def _refuse(self, answer: bytes) -> None:
        """The last word, unless an answer is on its way."""
        if self._is_idle or not (self._answered and self._answered.response_started):
            self.transport.write(answer)
        self.transport.close()

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.stream_seconds, self._check_reader)

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _check_reader(self) -> None:
        """A reader that took something since the last look is slow, one that took nothing is gone."""
        self._unread_timer = None
        waiting = self.transport.get_write_buffer_size()
        if waiting >= self._unread:
            self.transport.abort()
        else:
            self._await_reader()

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other._is_idle and not other.transport.is_closing()]
        if idle:
            min(idle, key=lambda other: other._last_active).transport.close()
        else:
            self.transport.write(_FULL)
            self.transport.close()


def _without_upgrade(piece: bytes) -> bytes:
    """A server may ignore that a client would rather speak another protocol (RFC 9110, section 7.8), as Java's client and
    `curl --http2` would at each request. The parser takes it as granted, and drops the body."""
    head, end, rest = piece.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"ignored", head) + end + rest if _UPGRADE.search(head) else piece


def _names_host(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """RFC 9112, section 3.2: one Host and no more, which older clients may leave out."""
    hosts = [value for name, value in headers if name == b"host"]
    return version == "1.0" if not hosts else len(hosts) == 1 and _HOST.fullmatch(hosts[0].strip()) is not None


def connection_class(options: ServerOptions) -> type[asyncio.Protocol]:
    """The protocol that uvicorn makes one of for each connection."""
    settings = {
        "stream_seconds": options.stream_timeout,
        "max_connections": options.max_connections,
        "turns": count(),
    }
    return cast(type[asyncio.Protocol], type("Connection", (Connection,), settings))


def connection_of(scope: Scope) -> Connection | None:
    """None where another server than uvicorn runs the application, and where the connection is gone."""
    reference = scope.get(CONNECTION)
    return None if reference is None else cast(Connection | None, reference())


def _set_up(own: socket.socket | None) -> None:
    if own is None or own.family not in (socket.AF_INET, socket.AF_INET6):
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS // 4)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
