"""`/health` (the process and its engine live), `/ready` (it takes requests), `/version` (what computes the answers).

Reads flags only, so it answers while the engine is busy. `/health` and `/ready` need no API key. Here and elsewhere routes give
responses: of other values FastAPI makes models, at each start and each answer.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvist import __version__
from kvist.server.state import state_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine can go on, else 503 with the reason."""
    trouble = state_of(request).engine.health
    if trouble is not None:
        return JSONResponse({"status": "failed", "reason": trouble}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken: the engine runs, and the server is not about to stop."""
    state = state_of(request)
    is_ready = state.life.ready and state.engine.health is None
    return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


@router.get("/version")
async def version(request: Request) -> Response:
    """What runs here. Two servers of one model file and one numeric profile give the same answers, bit for bit."""
    config = state_of(request).engine.config
    told = {
        "version": __version__,
        "profile": config.profile,
        "isa": config.isa,
        "model": config.served_model_name,
        "kv_cache_dtype": config.spec.kv_format,
        "block_size": config.spec.block_size,
        "max_model_len": config.effective_max_len,
    }
    return JSONResponse(told)
