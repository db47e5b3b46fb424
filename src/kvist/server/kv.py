"""`/v1/kv/...`: what the KV memory holds, why a prompt misses, and what is to be kept or forgotten.

Knows the questions of `engine.kv_view`, and which prefixes a caller may see: with API keys those of the own key (and of one
`cache_salt` of it), without keys everybody's unless a `cache_salt` is named. The radix view is worked out in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from kvist.errors import InvalidRequestError, KvistError
from kvist.kv.hints import KVHints
from kvist.server.auth import is_isolated, key_of, salt_of
from kvist.server.body import read_body
from kvist.server.chat import render
from kvist.server.following import FollowedStream
from kvist.server.protocol import ChatRequest, parse_request
from kvist.server.state import ServerState, state_of


def _known_query(request: Request) -> None:
    """What is misspelt, or belongs into the body, would change what a question means: a flush of one salt, say, to one of all.
    Raises InvalidRequestError."""
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name in known and count > 1:
            raise InvalidRequestError(f"{name} stands in the query {count} times; give it once.", param=name)
        if name not in known:
            takes = f"its query takes {', '.join(sorted(known))}" if known else "it takes none, and reads a body"
            raise InvalidRequestError(f"{name} is no query parameter of {request.url.path}; {takes}.", param=name)


router = APIRouter(prefix="/v1/kv", dependencies=[Depends(_known_query)])

MAX_PAGE = 1000
FOLLOW_SECONDS = 0.25
"""How often a follower of events is told of new ones."""

Salt = Annotated[str | None, Query(alias="cache_salt", max_length=1024)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


class PromptRequest(BaseModel):
    """One prompt: text, token ids or messages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """True without it for a text; a template writes its own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        if self.messages is None and "chat_template_kwargs" in self.model_fields_set:
            raise InvalidRequestError(
                "chat_template_kwargs goes with messages, not with prompt; leave it out.", param="chat_template_kwargs"
            )
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "The chat template writes the special tokens; leave add_special_tokens out.", param="add_special_tokens"
            )
        return self


class PinRequest(PromptRequest):
    """`pin` false without `priority` withdraws what the caller asked to keep of the prompt."""

    pin: bool = True
    ttl: float | None = None
    priority: int | None = None

    @property
    def hints(self) -> KVHints | None:
        if not self.pin and self.priority is None and self.ttl is None:
            return None
        return KVHints(self.pin, self.ttl, self.priority)


class FlushRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)


def scope_of(request: Request, client_salt: str | None) -> str | None:
    """Whose prefixes a caller may see: a salt, or None for all."""
    return salt_of(request, client_salt) if client_salt is not None or is_isolated(request) else None


@router.get("/stats")
async def stats(request: Request, cache_salt: Salt = None) -> Response:
    """The pool, the policy and the counts of the caller's own blocks."""
    return JSONResponse(await state_of(request).engine.ask_kv("stats", salt=scope_of(request, cache_salt)))


@router.get("/blocks")
async def blocks(request: Request, cache_salt: Salt = None, start: Annotated[int, Query(ge=0)] = 0, limit: Limit = 100) -> Response:
    """Cached blocks by id, a page at a time: those from the id `start` on."""
    salt = scope_of(request, cache_salt)
    return JSONResponse(await state_of(request).engine.ask_kv("blocks", salt=salt, start=start, limit=limit))


@router.get("/prefixes")
async def prefixes(
    request: Request,
    cache_salt: Salt = None,
    parent: Annotated[str | None, Query(max_length=64)] = None,
    limit: Limit = 100,
) -> Response:
    """The radix view: runs of blocks below `parent` (a `last` of this listing), or the beginnings."""
    found = await state_of(request).engine.ask_kv("prefixes", salt=scope_of(request, cache_salt))
    return JSONResponse(await asyncio.to_thread(found.tree, parent, limit))


@router.post("/explain")
async def explain(request: Request) -> Response:
    """How much of a prompt would hit now, where it differs from what is known, and why no more hits."""
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes, partial(parse_request, PromptRequest))
    token_ids = await _token_ids(state, body)
    salt, plain = salt_of(request, body.cache_salt), salt_of(request, None)
    return JSONResponse(await state.engine.ask_kv("explain", salt=salt, token_ids=token_ids, plain_salt=plain))


@router.post("/pin")
async def pin(request: Request) -> Response:
    """Keep what is cached of a prompt: pinned, or by priority, for `ttl` seconds or until it is withdrawn."""
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes, partial(parse_request, PinRequest))
    try:
        hints = body.hints
        token_ids = await _token_ids(state, body)
        salt = salt_of(request, body.cache_salt)
        return JSONResponse(await state.engine.ask_kv("pin", salt=salt, token_ids=token_ids, hints=hints))
    except InvalidRequestError as error:
        if error.param is None or not error.param.startswith("kv."):
            raise
        # A part of `kv` in a completion is a field of its own here.
        raise InvalidRequestError(str(error).replace("kv.", ""), param=error.param.removeprefix("kv.")) from None


@router.post("/flush")
async def flush(request: Request) -> Response:
    """Forget the caller's prefixes that no request holds and that are not pinned."""
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes, partial(parse_request, FlushRequest))
    return JSONResponse(await state.engine.ask_kv("flush", salt=scope_of(request, body.cache_salt)))


@router.get("/preemptions")
async def preemptions(
    request: Request, cache_salt: Salt = None, since: Annotated[int, Query(ge=0)] = 0, limit: Limit = 100
) -> Response:
    """The latest requests that lost their blocks to others: for whom, how much, which way they came back, and when."""
    salt = scope_of(request, cache_salt)
    return JSONResponse(await state_of(request).engine.ask_kv("preemptions", salt=salt, since=since, limit=limit))


@router.get("/events")
async def events(
    request: Request,
    cache_salt: Salt = None,
    since: Annotated[int, Query(ge=0)] = 0,
    limit: Limit = 100,
    follow: bool = False,
) -> Response:
    """What happened to blocks from event `since` on; with `follow` as server-sent events until the client leaves (8 such
    streams to a key, 64 in all; more get 429)."""
    state = state_of(request)
    ask = partial(state.engine.ask_kv, "events", salt=scope_of(request, cache_salt), limit=limit)
    first = await ask(since=since)
    return FollowedStream(_follow(state, request, ask, first), state.followers, key_of(request)) if follow else JSONResponse(first)


async def _follow(state: ServerState, request: Request, ask: Any, found: dict[str, Any]) -> AsyncIterator[str]:
    yield ": following\n\n"
    while state.life.ready and not await request.is_disconnected():
        for event in found["events"]:
            yield f"data: {json.dumps(event)}\n\n"
        await asyncio.sleep(FOLLOW_SECONDS)
        try:
            found = await ask(since=found["next"])
        except KvistError:
            return


async def _token_ids(state: ServerState, body: PromptRequest) -> list[int]:
    """At least one. Raises InvalidRequestError."""
    token_ids = await _any_token_ids(state, body)
    if not token_ids:
        raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
    if len(token_ids) > (limit := state.engine.config.effective_max_len):
        raise InvalidRequestError(
            f"The prompt has {len(token_ids)} tokens, and no request can have more than {limit}; shorten it.", param="prompt"
        )
    return token_ids


async def _any_token_ids(state: ServerState, body: PromptRequest) -> list[int]:
    if body.messages is not None:
        fields = {"messages": body.messages, "chat_template_kwargs": body.chat_template_kwargs}
        return await render(state, parse_request(ChatRequest, fields), None)
    if isinstance(body.prompt, str):
        await state.check_size(len(body.prompt), "prompt")
        return await state.engine.encode(body.prompt, body.add_special_tokens is not False)
    vocab_size = state.engine.config.model.vocab_size
    token_ids = body.prompt or []
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequestError(
            f"prompt holds a token id outside the model's vocabulary (0 to {vocab_size - 1}).", param="prompt"
        )
    return token_ids
