"""Errors as HTTP answers: one body, `{"error": {"message", "type", "param", "code"}}`, for whatever went wrong.

Knows the exception tree, Starlette's own refusals (404, 405) and `Refusal`, for what only HTTP can refuse. Bugs answer 500 with a
fixed sentence; their traceback goes to the log alone.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvist.errors import EngineStoppedError, InvalidRequestError, KvistError, ModelNotFoundError, UsageError

CLIENT_GONE = 499
MAX_MESSAGE, MAX_PARAM = 2000, 200
"""Characters of an error: messages show what was sent, which may be long."""


class Refusal(InvalidRequestError):
    """A request that HTTP itself refuses, with its status and headers."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = headers


def unknown_model(name: str, served: tuple[str, ...]) -> Refusal:
    return Refusal(
        404, f"The model {name!r} is not served here; this server has {', '.join(served)}.", param="model", code="model_not_found"
    )


def status_of(error: Exception) -> int:
    match error:
        case Refusal():
            return error.status
        case UsageError():
            return 400
        case ModelNotFoundError():
            return 404
        case EngineStoppedError():
            return 503
    return 500


def error_body(error: Exception) -> dict[str, Any]:
    """The OpenAI error object of an exception; a bug shows nothing of its inside."""
    status = status_of(error)
    message = str(error) if isinstance(error, KvistError) else "The server failed on this request; its log says why."
    param = error.param if isinstance(error, InvalidRequestError) else None
    code = error.code if isinstance(error, InvalidRequestError) else None
    if status >= 500 and code is None:
        code = "engine_stopped" if status == 503 else "internal_error"
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    shown = _clipped(message, MAX_MESSAGE)
    return {"error": {"message": shown, "type": kind, "param": param and _clipped(param, MAX_PARAM), "code": code}}


def _clipped(text: str, size: int) -> str:
    """What an answer can hold: half a surrogate pair, which JSON may name and UTF-8 cannot write, is spelled out."""
    shown = text if len(text) <= size else f"{text[:size]} ..."
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def error_response(error: Exception) -> Response:
    headers = error.headers if isinstance(error, Refusal) else None
    return JSONResponse(error_body(error), status_of(error), headers=headers)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            message, code = f"There is no {request.method} {request.url.path} here.", "not_found"
        case 405:
            message, code = f"{request.url.path} does not answer to {request.method}.", "method_not_allowed"
        case _:
            message, code = str(error.detail), "refused"
    return error_response(Refusal(error.status_code, message, code=code, headers=dict(error.headers or {})))


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(InvalidRequestError(f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}.", param=param))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody is left to read an answer."""
    return Response(status_code=CLIENT_GONE)


def install(app: FastAPI) -> None:
    app.add_exception_handler(KvistError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_error)
