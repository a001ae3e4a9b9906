"""Errors in OpenAI's format: `{"error": {message, type, param, code}}` with the matching HTTP status.

Server internals are not revealed: messages of our own errors are written for users, all others are replaced.
Retryable errors have `Retry-After`; permanent ones have `x-should-retry: false`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ....cluster.errors import (
    EngineDeadError,
    EngineGoneError,
    EngineStalledError,
    MantaError,
    NotANumberError,
    OutputProcessingError,
    RequestError,
    StorageError,
    brief,
    brief_name,
)
from .rejections import note

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    431: "RequestTooLargeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
ENGINE_DEAD = "The engine that served this request has stopped; it is being replaced. Retry."
ENGINE_GONE = "The engine of this server has stopped; it is being replaced. Retry."
INTERNAL = "Internal server error."
MAX_SHOWN = 200  # characters of a path, or of a message that is not ours


class ClientDisconnectedError(Exception):
    """The client closed the connection; no response can be sent."""


def error_body(status: int, message: str, param: str | None = None, kind: str | None = None) -> bytes:
    """Return the JSON body of an error; also used inside streams."""
    error = {"message": message, "type": kind or kind_of(status), "param": param, "code": status}
    return orjson.dumps({"error": error})


def kind_of(status: int) -> str:
    return KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")


def public_error(error: BaseException) -> MantaError:
    """Return our own error if it is meant for users, else a generic one."""
    if isinstance(error, EngineGoneError):
        return EngineGoneError(ENGINE_GONE)
    if isinstance(error, EngineDeadError) and not isinstance(error, EngineStalledError):
        return EngineDeadError(ENGINE_DEAD)
    if isinstance(error, NotANumberError) or (isinstance(error, MantaError) and error.status != 500):
        return error
    return MantaError(INTERNAL)


def is_engine_death(error: Mapping[str, Any]) -> bool:  # Any: JSON
    """Return whether an error object says that an engine died or stalled under the request."""
    return error.get("message") == ENGINE_DEAD


def ends_with_engine_death(end: bytes) -> bool:
    """Return whether the end of a stream, in any API, says that an engine died."""
    return ENGINE_DEAD.encode() in end


def error_response(error: MantaError) -> Response:
    return json_error(error.status, error.message, error.param, error.kind, retryable=error.retryable)


def refused(scope: Scope, error: MantaError) -> Response:
    """Return the response to a request that fails before an engine; record why, for the log."""
    note(scope, error)
    return error_response(error)


def json_error(
    status: int,
    message: str,
    param: str | None = None,
    kind: str | None = None,
    *,
    retryable: bool = False,
    headers: Mapping[str, str] | None = None,
    scope: Scope | None = None,
) -> Response:
    """Return an error; the reason is recorded for the log if `scope` is given."""
    if scope is not None:
        note(scope, message)
    headers = dict(headers or {})
    if retryable or status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif status >= 500:
        headers["x-should-retry"] = "false"
    body = error_body(status, message, param, kind)
    return Response(body, status, headers, media_type="application/json")


def install_handlers(app: FastAPI) -> None:
    """Answer all errors before or inside a route; the gate answers the rest."""

    @app.exception_handler(MantaError)
    async def on_manta_error(request: Request, error: MantaError) -> Response:
        log_if_internal(error, request.scope)
        return refused(request.scope, public_error(error))

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return refused(request.scope, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, MantaError):
            return refused(request.scope, error.__cause__)
        status, message = error.status_code, str(error.detail)
        if status in (404, 405):
            message = f"{message}: {request.method} {brief(request.url.path, MAX_SHOWN)}"
        return json_error(status, message, headers=error.headers, scope=request.scope)

    @app.exception_handler(ClientDisconnectedError)
    async def on_client_disconnected(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=499)


def log_if_internal(error: BaseException, scope: Any) -> None:  # Any: an ASGI scope is an open mapping.
    """Log a failure that the user did not cause, once and with the request id."""
    request_id = scope.get("state", {}).get("request_id")
    if isinstance(error, StorageError):
        logger.error("request %s: files and batches cannot be kept: %s", request_id, error.__cause__)
    elif isinstance(error, OutputProcessingError):
        return  # already logged where it happened
    elif not isinstance(error, MantaError) or error.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)


def from_validation(errors: Any) -> RequestError:  # Any: pydantic's error dictionaries are untyped.
    """Name the first wrong field by its dotted path, without the client's value."""
    first = errors[0]
    if (
        first["type"] in ("json_invalid", "model_attributes_type", "dict_type", "missing")
        and len(first["loc"]) == 1
    ):
        return RequestError("The body must be a JSON object (Content-Type: application/json).")
    if first["type"] == "json_invalid":
        return RequestError("The body is not valid JSON.")
    path = brief_name(".".join(str(part) for part in first["loc"] if part != "body" and not _is_type(part)))
    more = f" ({len(errors) - 1} more fields are wrong.)" if len(errors) > 1 else ""
    return RequestError(f"{path}: {_in_json(first)}.{more}", param=path or None)


# JSON's terms for pydantic messages that use Python's names.
_JSON_WORDS = {
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "none_required": "Input should be null",
    "extra_forbidden": "This field is not known; leave it out",
}


def _in_json(error: Mapping[str, Any]) -> str:  # Any: pydantic's error
    message: str = _JSON_WORDS.get(error["type"]) or error["msg"]
    return message.replace("'", '"') if error["type"] == "literal_error" else message


def _is_type(part: object) -> bool:
    """Return whether a part of pydantic's path is a branch of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)
