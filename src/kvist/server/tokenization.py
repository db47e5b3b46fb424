"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: a text or a conversation as token ids, token ids as text, and
what else a client needs that counts tokens without a tokenizer of its own (lm-eval does).

Knows the two bodies. What a completion or a chat request would be given is what is told here: the same code makes the ids. Neither
needs an engine step; long texts are worked on in threads.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, FailFast, Field
from starlette.responses import JSONResponse, Response

from kvist.errors import InvalidRequestError
from kvist.server.body import read_body
from kvist.server.chat import render
from kvist.server.protocol import ChatRequest, parse_request
from kvist.server.state import ServerState, state_of

router = APIRouter()

MANY_TOKENS = 10_000


class TokenizeRequest(BaseModel):
    """Either `prompt` or `messages`; the fields after `messages` go with them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """True without it for a prompt; a template writes its own, so with messages it is false."""
    return_token_strs: bool = False
    messages: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


CHAT_FIELDS = frozenset({"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"})


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, and how many a context holds."""
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes, partial(parse_request, TokenizeRequest))
    state.check_model(body.model)
    ids = await _ids(state, body)
    strings = [state.labels[token_id].text for token_id in ids] if body.return_token_strs else None
    size = state.engine.config.effective_max_len
    return JSONResponse({"count": len(ids), "max_model_len": size, "tokens": ids, "token_strs": strings})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes, partial(parse_request, DetokenizeRequest))
    state.check_model(body.model)
    size = state.engine.config.model.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < size:
            raise InvalidRequestError(f"tokens holds {token_id}, but the vocabulary has {size} tokens.", param="tokens")
    decode = partial(state.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": await asyncio.to_thread(decode) if len(body.tokens) > MANY_TOKENS else decode()})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The special tokens by name (null where there is none), and the chat template."""
    engine = state_of(request).engine
    info = engine.tokenizer.info
    told = {
        **{name: info.special_tokens.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        "add_bos_token": info.add_bos,
        "model_max_length": engine.config.effective_max_len,
        "chat_template": getattr(engine.chat_template, "source", None),
    }
    return JSONResponse(told)


async def _ids(state: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        for name in CHAT_FIELDS & body.model_fields_set:
            raise InvalidRequestError(f"{name} goes with messages, not with prompt; leave it out.", param=name)
        await state.check_size(len(body.prompt), "prompt")
        return await state.engine.encode(body.prompt, body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise InvalidRequestError(
            "The chat template writes the special tokens; leave add_special_tokens out.", param="add_special_tokens"
        )
    chat = parse_request(ChatRequest, {name: getattr(body, name) for name in CHAT_FIELDS & body.model_fields_set})
    return await render(state, chat, chat.tool_use)
