"""`POST /v1/embeddings`: refused in a sentence, so that a client that asks for them learns more than "not found"."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvist.server.failures import Refusal

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embedding() -> Response:
    """Not offered."""
    raise Refusal(
        400, "This server generates text and makes no embeddings; ask a server with an embedding model.", code="not_offered"
    )
