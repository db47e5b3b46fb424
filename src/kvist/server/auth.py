"""API keys: an ASGI layer that lets a request through only with one of them, whatever its path, except `/health`.

Knows no routes. Comparison takes the same time for every wrong key; keys are never logged and only their digests are kept.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from kvist.server.failures import Refusal, error_response

OPEN_PATH = "/health"


class ApiKeyLayer:
    """Refuses with 401 what does not carry `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN_PATH:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if not (len(given) == 1 and self._accepts(given[0])):
                message = (
                    "No API key was given; send it as the header `Authorization: Bearer KEY`."
                    if not given
                    else "The API key is not one that this server knows."
                )
                refusal = Refusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _accepts(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
