"""The API-key layer: lets a request through only with a known key, whatever its path, except the two health routes.

Knows no other routes. A key that has too many requests open gets 429. What a request's caller is, and the cache salt that follows
from it, is in the ASGI scope for the routes. Invariant: every request that was counted is counted down when it ends, however.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist.server.access import access_of
from kvist.server.failures import Refusal, error_response
from kvist.server.keys import Key, KeyRing

OPEN_PATHS = frozenset({"/health", "/ready"})
CALLER = "kvist.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a key, and whether its prefixes are its own."""

    key: Key
    isolated: bool


def salt_of(request: Request, client_salt: str | None) -> str:
    """The salt that keeps a request's prefixes apart from those of other keys and other salts."""
    caller: Caller | None = request.scope.get(CALLER)
    return (client_salt or "") if caller is None or not caller.isolated else caller.key.salt(client_salt or "")


def key_of(request: Request) -> bytes | None:
    """What tells callers apart: the digest of the key; None on a server without keys."""
    caller: Caller | None = request.scope.get(CALLER)
    return None if caller is None else caller.key.digest


def is_isolated(request: Request) -> bool:
    """Whether the caller has a key of its own, and with it prefixes that nobody else sees."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller is not None and caller.isolated


class ApiKeyLayer:
    """Refuses with 401 what does not carry `Authorization: Bearer KEY`. `max_requests` are those that a key may have open at once;
    only requests with a body count."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, isolate: bool, max_requests: int | None) -> None:
        self._app = app
        self._keys = keys
        self._isolate = isolate
        self._max_requests = max_requests
        self._open: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            key = self._key_of(scope)
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        access_of(scope).key = key.name
        scope[CALLER] = Caller(key, self._isolate)
        if scope["method"] == "POST":
            await self._count(key, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _key_of(self, scope: Scope) -> Key:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        headers = {"www-authenticate": "Bearer"}
        if not given:
            message = "No API key was given; send it as the header `Authorization: Bearer KEY`."
            raise Refusal(401, message, code="invalid_api_key", headers=headers)
        scheme, _, text = given[0].partition(b" ")
        key = self._keys.find(text.strip()) if scheme.lower() == b"bearer" and len(given) == 1 else None
        if key is None:
            raise Refusal(401, "The API key is not one that this server knows.", code="invalid_api_key", headers=headers)
        return key

    async def _count(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        if self._max_requests is not None and self._open[key.digest] >= self._max_requests:
            message = f"This API key has {self._max_requests} requests open, which is its limit; wait until one of them has ended."
            refusal = Refusal(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})
            await error_response(refusal)(scope, receive, send)
            return
        self._open[key.digest] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[key.digest] -= 1
            if not self._open[key.digest]:
                del self._open[key.digest]


def route_path(scope: Scope) -> str:
    """The path as routes are matched: without the root path, if it begins with that."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    rest: Any = path.removeprefix(root)
    return rest if root and rest != path and rest.startswith("/") else path
