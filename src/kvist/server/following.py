"""Streams that are followed for as long as the client likes, within bounds: so many to a key, so many in all.

Knows no routes and no engine. Invariant: a place is given back however its stream ends, and a stream that never began took none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvist.server.failures import Refusal, error_response

MAX_FOLLOWERS = 64
MAX_FOLLOWERS_PER_KEY = 8


class Followers:
    def __init__(self, most: int = MAX_FOLLOWERS, most_per_key: int = MAX_FOLLOWERS_PER_KEY) -> None:
        self._most, self._most_per_key = most, most_per_key
        self._open: Counter[bytes | None] = Counter()

    @property
    def num_open(self) -> int:
        return self._open.total()

    @contextmanager
    def place(self, key: bytes | None) -> Iterator[None]:
        """`key` None: without keys all callers are one, and only the bound of all counts. Raises Refusal (429)."""
        if key is not None and self._open[key] >= self._most_per_key:
            raise _refusal(f"This API key follows {self._most_per_key} streams of events already, which is the most for a key")
        if self.num_open >= self._most:
            raise _refusal(f"{self._most} streams of events are followed already, which is the most for this server")
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


def _refusal(why: str) -> Refusal:
    message = f"{why}; end one of them, or ask again and again with `since` and without `follow`."
    return Refusal(429, message, param="follow", code="too_many_followers", headers={"retry-after": "10"})


class FollowedStream(StreamingResponse):
    """Server-sent events that take a place among `followers`, or a 429."""

    def __init__(self, content: AsyncIterator[str], followers: Followers, key: bytes | None) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._followers, self._key = followers, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._followers.place(self._key):
                await super().__call__(scope, receive, send)
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, send)
