"""`/openapi.json`: what FastAPI knows of the routes, and the request bodies, which the routes read by themselves.

Knows the requests' pydantic models. A field that is accepted with neutral values alone is shown with those values.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from kvist.server.kv import FlushRequest, PinRequest, PromptRequest
from kvist.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from kvist.server.tokenization import DetokenizeRequest, TokenizeRequest
from kvist.server.unoffered import HARMLESS, NEUTRAL

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/kv/explain": PromptRequest,
    "/v1/kv/pin": PinRequest,
    "/v1/kv/flush": FlushRequest,
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path, model in BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        if issubclass(model, GenerationRequest):
            neutral = {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
            schema["properties"] = {name: {} for name in sorted(HARMLESS)} | neutral | schema["properties"]
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
