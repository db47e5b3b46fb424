"""A request's body: read within a size, checked for depth, parsed as JSON. What is wrong is a 400, 408, 413 or 415, never a 500.

Bodies are JSON: one without a type, or with what `curl -d` says by itself, passes for it. Not so from a web page (a request with an
`Origin`): browsers send these to any server without asking it first, JSON by its name only to one that allows the page.

Knows no fields. `NaN`, `Infinity` and `1e999` pass as floats, so that the field that holds one is refused by name.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from kvist.errors import InvalidRequestError
from kvist.server.failures import Refusal
from kvist.server.pieces import DoubledNameError, load, members

T = TypeVar("T")

MAX_DEPTH = 64
MAX_MEMBERS = 100_000
MAX_VALUES = 250_000
"""Arrays, objects and their members; values of them all. The more there are, the longer parsing holds everybody's streams."""
READ_SECONDS = 60.0
DISCARD_SECONDS = 1.0
JSON_TYPES = frozenset({"application/json", "text/json"})
UNSAID_TYPES = frozenset({"", "application/x-www-form-urlencoded"})
SMALL_BODY = 64 * 1024
"""Bodies up to this size are parsed at once; larger ones in a thread and piece by piece, so that others' streams go on."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BLOCK = re.compile(rb'(?:%b|[^"]++){1,1000}+' % _STRING.pattern, re.DOTALL)
"""So many strings, and what lies between: no single search takes long."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


async def read_body(request: Request, limit: int, understand: Callable[[dict[str, Any]], T]) -> T:
    """What `understand` makes of the body's JSON object. Raises what it raises, InvalidRequestError for what is no such object,
    Refusal (408, 413, 415) and ClientDisconnect."""

    def run() -> T:
        value = parse(body)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"The body must be a JSON object, not {_kind(value)}.")
        return understand(value)

    body = await _read(request, limit)
    _check_headers(request.headers)
    return run() if len(body) <= SMALL_BODY else await asyncio.to_thread(run)


def _check_headers(headers: Headers) -> None:
    """Refuse what says that it is no plain JSON."""
    for name, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        encoding = headers.get(name, plain).strip().lower()
        if encoding not in ("", plain):
            raise Refusal(
                415,
                f"The body is encoded ({name}: {_shown(encoding)}), which is not read here; send it as it is.",
                code="unsupported_encoding",
                headers={"accept-encoding": "identity"},
            )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in JSON_TYPES or kind.endswith("+json") or (kind in UNSAID_TYPES and "origin" not in headers):
        return
    said = f"is {_shown(kind)}" if kind else "is missing"
    raise Refusal(415, f"The Content-Type {said}; send JSON as application/json.", code="unsupported_media_type")


def _shown(value: str) -> str:
    return ascii(value[:100])[1:-1]


async def _read(request: Request, limit: int) -> bytes:
    too_large = Refusal(
        413,
        f"The body is larger than the {limit} bytes that this server accepts.",
        code="request_too_large",
        headers={"connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        if request.headers.get("expect", "").lower() != "100-continue":
            await _discard(request)
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(READ_SECONDS):
            while more:
                chunk, more = await _chunk(request)
                size += len(chunk)
                if size > limit:
                    break
                parts.append(chunk)
    except TimeoutError:
        raise Refusal(408, "The body did not arrive in time.", code="timeout", headers={"connection": "close"}) from None
    if size > limit:
        parts.clear()
        if more:
            await _discard(request)
        raise too_large
    return b"".join(parts)


async def _chunk(request: Request) -> tuple[bytes, bool]:
    """The next piece, and whether more follow."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _discard(request: Request) -> None:
    """Read on for a moment without keeping anything: most clients look for an answer only after they have sent it all."""
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await _chunk(request))[1]:
                pass
    except TimeoutError:
        return


def parse(body: bytes) -> Any:
    """JSON from bytes. Raises InvalidRequestError for what is not UTF-8, not JSON, too deep or too much, names a member twice, or
    holds text that UTF-8 cannot. Depth and number of values are looked at first: nothing is built of what is refused for them."""
    _check_shape(body)
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=members) if len(body) <= SMALL_BODY else load(text)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 text (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} (character {error.pos}).") from None
    except DoubledNameError as error:
        name = error.name[:40]
        raise InvalidRequestError(f"The body names {name!r} twice in one object; send it once.", param=name) from None
    except ValueError:
        raise InvalidRequestError("The body is not JSON that can be read: a number has too many digits.") from None
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _check_shape(body: bytes) -> None:
    """Refuse what nests too deep, or is small to send and large to parse. What the body has of marks at all decides whether to look
    closer; most have few."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets <= MAX_DEPTH and brackets + body.count(b":") <= MAX_MEMBERS and body.count(b",") < MAX_VALUES:
        return
    depth = members = values = 0
    for block in _BLOCK.finditer(body):
        outside = _STRING.sub(b"", block[0])
        members += sum(map(outside.count, (b"[", b"{", b":")))
        values += outside.count(b",")
        if members > MAX_MEMBERS:
            raise InvalidRequestError(f"The body holds more than {MAX_MEMBERS} arrays, objects and members of objects.")
        if values > MAX_VALUES:
            raise InvalidRequestError(f"The body holds more than {MAX_VALUES} values.")
        depths = list(accumulate(memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b"), initial=depth))
        if max(depths) > MAX_DEPTH:
            raise InvalidRequestError(f"The body nests deeper than {MAX_DEPTH} levels.")
        depth = depths[-1]


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError("The body holds half a surrogate pair (\\ud800 to \\udfff alone), which is not text.") from None


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
