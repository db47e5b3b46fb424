"""The application: routes, error answers, the API-key layer and the engine's life, put together for one engine.

Knows every module of this room and none of their inner workings. The engine runs between the application's start and its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvist import __version__
from kvist.errors import KvistError
from kvist.server import chat, completions, embeddings, failures, health, kv, metrics, models, tokenization
from kvist.server.abilities import Abilities
from kvist.server.access import AccessLayer
from kvist.server.auth import ApiKeyLayer
from kvist.server.client import EngineClient
from kvist.server.keys import KeyRing
from kvist.server.life import Life
from kvist.server.logprobs import TokenLabels
from kvist.server.openapi import describe
from kvist.server.options import ServerOptions
from kvist.server.queueing import Queue
from kvist.server.series import KvistSeries
from kvist.server.state import ServerState
from kvist.server.vllm_metrics import VllmSeries
from kvist.server.warmup import warm_up, warm_up_forms

REQUEST_HEADERS = ("authorization", "content-type", "x-request-id", "x-kvist-events")
ANSWER_HEADERS = ("x-request-id", "retry-after")
"""Headers that the server reads, and those that pages of other origins may read."""


class _Application(FastAPI):
    """FastAPI within the layers that see every request and every answer, those to bugs included."""

    def __init__(self, layers: Callable[[ASGIApp], ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._layers = layers

    def build_middleware_stack(self) -> ASGIApp:
        return self._layers(super().build_middleware_stack())


def create_app(engine: EngineClient, options: ServerOptions | None = None, life: Life | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, which must not have been started yet. `life` is what the program around it shares
    with it. Raises ConfigError where a file of keys cannot be read."""
    options = options or ServerOptions()
    state = ServerState(
        engine=engine,
        options=options,
        metrics=metrics.Metrics(engine.snapshot),
        labels=TokenLabels(engine.tokenizer),
        queue=Queue(
            engine.snapshot,
            seats=engine.config.max_num_seqs,
            max_requests=options.max_queued_requests,
            max_tokens=options.max_queued_tokens,
            clock=time.monotonic,
        ),
        life=life or Life(),
        served_names=options.served_model_names or (engine.config.served_model_name,),
        abilities=Abilities.of(engine.chat_template, options.tool_call_parser, options.reasoning_parser),
    )

    state.metrics.registry.register(KvistSeries(state.metrics, engine.config))
    if options.vllm_metrics:
        state.metrics.registry.register(VllmSeries(state.metrics, engine.config, state.served_names[0]))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        forms: asyncio.Task[None] | None = None
        try:
            if options.warm_up:
                await warm_up(engine)
                forms = asyncio.create_task(warm_up_forms(engine))
            state.life.ready = True
        except KvistError as error:
            state.life.start_error = error
        try:
            yield
        finally:
            state.life.ready = False
            if forms is not None:
                forms.cancel()
            await engine.shutdown()

    keys = KeyRing(options.api_keys, options.api_key_file) if options.wants_keys else None
    app = _Application(
        partial(_layered, options=options, keys=keys, state=state),
        title="kvist",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.kvist = state
    for room in (chat, completions, tokenization, embeddings, models, kv, health, metrics):
        app.include_router(room.router)
    failures.install(app)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


def _layered(app: ASGIApp, *, options: ServerOptions, keys: KeyRing | None, state: ServerState) -> ASGIApp:
    """From the outside: request ids and logs, CORS, keys. A browser asks about CORS without a key, and reads refusals too."""
    if keys is not None:
        app = ApiKeyLayer(app, keys, isolate=options.key_isolation, max_requests=options.max_requests_per_key)
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # the official clients send a dozen of their own (x-stainless-...)
            expose_headers=ANSWER_HEADERS,
        )
    return AccessLayer(app, state.life, options.root_path)
