"""Server-sent events on one response: chunks, comments, and a sign of life after a long silence.

Knows ASGI's `send` and the way past it, no JSON. The response starts with the first thing that is written, so that a refusal before
it can be a plain answer. Invariants: what one `write` brings goes out as one piece; a comment never lands inside one; after `close`
nothing is sent. A keep-alive comment comes only after `silence` seconds without anything else: some clients choke on comments, and
some proxies close what stays silent. One timer a stream looks at the time of the last word; a chunk costs no timer of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from starlette.types import Scope, Send

from kvist.server.connection import connection_of

KEEP_ALIVE_SECONDS = 15.0
DATA = "data: "
DONE = f"{DATA}[DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """`scope` is the request's: where its connection is uvicorn's, pieces in mid-answer need no task to write them."""

    def __init__(self, scope: Scope, send: Send, silence: float = KEEP_ALIVE_SECONDS) -> None:
        self._scope = scope
        self._send = send
        self.connection = connection_of(scope)
        self._silence = silence
        self.started = False
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self.last_word = time.perf_counter()
        """When something was written last."""
        self._timer = self._loop.call_later(silence, self._look)
        self._keep_alive: asyncio.Task[None] | None = None

    async def write(self, pieces: Iterable[str]) -> None:
        """Whole events and comments, ASCII; with none the response only starts."""
        self._writing = True
        body = "".join(pieces).encode("ascii")
        if self.started and body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        else:
            await self._write(body)
        self._writing = False
        self.last_word = time.perf_counter()

    def ready(self) -> bool:
        """Whether `write_now` may be called, while nobody is in `write`."""
        return self.started and self.connection is not None and self.connection.can_write_piece(self._scope)

    def write_now(self, text: str, now: float) -> None:
        """`write`, of a stream that is `ready`; `now` is time.perf_counter's."""
        assert self.connection is not None
        if text:
            self.connection.write_piece(text)
            self.last_word = now

    @property
    def is_cut(self) -> bool:
        """The connection ends: what was written may have reached nobody."""
        return self.connection is not None and self.connection.transport.is_closing()

    async def end(self) -> None:
        self.close()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        self._timer.cancel()
        if self._keep_alive is not None:
            self._keep_alive.cancel()

    async def _write(self, body: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _look(self) -> None:
        """Say something if all has been silent for long, and no word is on its way to a slow reader."""
        now = time.perf_counter()
        left = self.last_word + self._silence - now
        if left <= 0:
            left, self.last_word = self._silence, now
            if not self._writing and (self._keep_alive is None or self._keep_alive.done()):
                self._keep_alive = self._loop.create_task(self._write(_KEEP_ALIVE))
        self._timer = self._loop.call_later(left, self._look)


def event(data: str) -> str:
    """One line of JSON as an event."""
    return f"{DATA}{data}\n\n"


def comment(text: str) -> str:
    return f": {text}\n\n"
