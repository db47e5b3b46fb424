"""The outermost layer: request ids in and out, one access line a request, a plain answer while the server drains.

Knows ASGI and what routes report of a request in its `Access`; never a body, a prompt, a query or a key. A request id of the client
is taken over where it is plain; any other is replaced. Requests that only look (GET) are logged when they fail, or at debug level.
Invariant: `life.open_requests` counts the requests that may have work in the engine, exactly.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.server.failures import CLIENT_GONE, Refusal, error_response
from kvist.server.life import Life

log = logging.getLogger("kvist.access")

ACCESS = "kvist.access"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
MAX_SHOWN_PATH = 120


@dataclass(slots=True)
class Access:
    """What the access line says of a request; routes and layers fill it in as they learn it."""

    request_id: str = ""
    key: str | None = None
    status: int | None = None
    outcome: str | None = None
    usage: Mapping[str, Any] | None = None
    """OpenAI's usage object."""
    queue_time: float | None = None
    first_token_time: float | None = None
    started: float = field(default_factory=time.perf_counter)


def access_of(scope: Scope) -> Access:
    """The request's record; one that nobody reads where the layer is not there."""
    found = scope.get(ACCESS)
    return found if isinstance(found, Access) else Access()


class AccessLayer:
    """`root_path` is what a proxy may leave before each path."""

    def __init__(self, app: ASGIApp, life: Life, root_path: str = "") -> None:
        self._app = app
        self._life = life
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._root_path
        access = scope[ACCESS] = Access(_request_id(scope))
        id_header = (b"x-request-id", access.request_id.encode())
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                access.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        works, method = scope["method"] == "POST", scope["method"]
        if method == "HEAD":
            # What can be read can be asked about. uvicorn, which has the scope as it was, leaves the body out.
            scope = {**scope, "method": "GET"}
        self._life.open_requests += works
        try:
            await (self._refuse if works and self._life.draining else self._app)(scope, receive, send_with_id)
        except Exception:
            fields = {"id": access.request_id}
            log.exception("request %(id)s failed", fields, extra={"fields": fields})
            if not complete:
                raise
        finally:
            _report({**scope, "method": method}, access)
            self._life.open_requests -= works

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"retry-after": str(self._life.seconds_left()), "connection": "close"}
        refusal = Refusal(503, "The server is shutting down; ask again later.", code="shutting_down", headers=headers)
        await error_response(refusal)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return bytes(given[0]).decode("ascii")
    return uuid.uuid4().hex


def _report(scope: Scope, access: Access) -> None:
    looks = scope["method"] in ("GET", "HEAD", "OPTIONS") and access.status is not None and access.status < 400
    level = logging.DEBUG if looks else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = fields_of(scope, access)
    log.log(level, "%(method)s %(route)s %(status)s", fields, extra={"fields": fields})


def fields_of(scope: Scope, access: Access) -> dict[str, Any]:
    """The access line as names and values; times in seconds, what is unknown is left out."""
    client, usage = scope.get("client"), access.usage or {}
    status = CLIENT_GONE if access.status is None else access.status
    values = {
        "method": ascii(scope["method"])[1:-1],
        "route": _route(scope),
        "status": status,
        "id": access.request_id,
        "key": access.key,
        "client": client[0] if client else None,
        "outcome": access.outcome or ("failed" if status >= 500 else "refused" if status >= 400 else None),
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "queue_s": access.queue_time,
        "ttft_s": access.first_token_time,
        "total_s": time.perf_counter() - access.started,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items() if value is not None}


def _route(scope: Scope) -> str:
    """The route's pattern; of a path that is no route, its beginning, without line breaks or anything else that is not ASCII."""
    pattern = getattr(scope.get("route"), "path", None)
    return str(pattern) if pattern else ascii(scope["path"][:MAX_SHOWN_PATH])[1:-1].replace(" ", "%20")
