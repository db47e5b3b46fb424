"""`/v1/models`: the one model that this server has, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvist.server.failures import unknown_model
from kvist.server.state import ServerState, state_of

router = APIRouter()


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "kvist",
        "root": state.engine.config.served_model_name,
        "max_model_len": state.engine.config.effective_max_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name that the field `model` may have."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.served_names]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """One of them, or 404."""
    state = state_of(request)
    if name not in state.served_names:
        raise unknown_model(name, state.served_names)
    return JSONResponse(_card(state, name))
