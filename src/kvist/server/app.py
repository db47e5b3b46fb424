"""The application: routes, error answers, the API-key layer and the engine's life, put together for one engine.

Knows every module of this room and none of their inner workings. The engine runs between the application's start and its end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from kvist import __version__
from kvist.server import chat, completions, failures, health, metrics, models
from kvist.server.auth import ApiKeyLayer
from kvist.server.client import EngineClient
from kvist.server.logprobs import TokenLabels
from kvist.server.openapi import describe
from kvist.server.state import ServerOptions, ServerState


def create_app(engine: EngineClient, options: ServerOptions | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, which must not have been started yet."""
    options = options or ServerOptions()
    state = ServerState(
        engine=engine,
        options=options,
        metrics=metrics.Metrics(engine.snapshot),
        labels=TokenLabels(engine.tokenizer),
        served_names=options.served_model_names or (engine.config.served_model_name,),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        state.ready = True
        try:
            yield
        finally:
            state.ready = False
            await engine.shutdown()

    app = FastAPI(title="kvist", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.kvist = state
    for room in (chat, completions, models, health, metrics):
        app.include_router(room.router)
    failures.install(app)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    if options.api_keys:
        app.add_middleware(ApiKeyLayer, keys=options.api_keys)
    return app
