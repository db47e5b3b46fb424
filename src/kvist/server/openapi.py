"""`/openapi.json`: what FastAPI knows of the routes, and the request bodies, which the routes read by themselves.

Knows the two requests' pydantic models. A field that is accepted with neutral values alone is shown with those values.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvist.server.protocol import HARMLESS, NEUTRAL, ChatRequest, CompletionRequest, GenerationRequest

BODIES: dict[str, type[GenerationRequest]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path, model in BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schema["properties"] |= {name: {} for name in sorted(HARMLESS)}
        schema["properties"] |= {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
