"""Errors in OpenAI's format: `{"error": {message, type, param, code}}` with the matching HTTP status.

Server internals are not revealed: messages of our own errors are written for users, all others are replaced.
Retryable errors have `Retry-After`; permanent ones have `x-should-retry: false`.

Requests that failed before they reached an engine are logged here: which one, with what status and why. A
request that reaches the engine is logged by its run, a forwarded one by the replica that answers it;
`logged_elsewhere` marks both. Log lines contain no client text: quoted parts of a reason are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
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
    printable,
    redact_values,
)
from ...system.log_setup import Event
from ..config.settings import OPEN_PATHS

logger = logging.getLogger(__name__)
requests_logger = logging.getLogger("manta.requests")  # one line for each request that ends

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


_PLAIN_PATH = re.compile(r"[\w.-]{1,100}", re.A)  # the format of declared field names
MAX_REASON = 300
MAX_PARAM = 100
TRACE_HEADERS = ("traceparent", "tracestate")


class Rejection(NamedTuple):
    request_id: str | None  # the client's, or one that we generated
    method: str
    route: str | None  # path template; None if there is none
    status: int
    param: str | None  # the wrong field
    reason: str | None  # the error's message without client text
    seconds: float  # from the request's arrival to the end of its response
    error: MantaError | None  # the exception, if it is one of ours
    trace_headers: Mapping[str, str]  # as the client sent them


class _Noted(NamedTuple):
    param: str | None = None
    reason: str | None = None
    error: MantaError | None = None


def ignore(refusal: Rejection) -> None:
    """Do nothing: the default for callers that need only the log line."""


def note(scope: Scope, error: MantaError | str) -> None:
    ours = None if isinstance(error, str) else error
    message, param = (error, None) if isinstance(error, str) else (error.message, error.param)
    if param and not _PLAIN_PATH.fullmatch(param):  # the field's name is the client's
        message = message.replace(param, "...")
    reason = printable(redact_values(message)[:MAX_REASON])
    scope.setdefault("state", {})["refusal"] = _Noted(param and param[:MAX_PARAM], reason, ours)


def logged_elsewhere(scope: Scope) -> None:
    """Mark the request as logged by its run or by another process."""
    scope.setdefault("state", {})["logged"] = True


def refusal_of(scope: Scope, status: int, seconds: float) -> Rejection | None:
    """Return the rejection of a request that failed here. Refused probes are not reported."""
    state: dict[str, Any] = scope.get("state", {})  # Any: Starlette's open state
    if status < 400 or state.get("logged") or scope["path"] in OPEN_PATHS:
        return None
    noted: _Noted = state.get("refusal", _Noted())
    return Rejection(
        request_id=state.get("request_id"),
        method=scope["method"],
        route=getattr(scope.get("route"), "path", None),
        status=status,
        param=noted.param,
        reason=noted.reason,
        seconds=seconds,
        error=noted.error,
        trace_headers=trace_headers(Headers(scope=scope)),
    )


def log_refusal(refusal: Rejection, replica: str) -> None:
    fields = ("request_id", "method", "route", "status", "param", "reason")
    line = {name: getattr(refusal, name) for name in fields}
    line |= {"e2e_ms": round(1000 * refusal.seconds, 1), "replica": replica}
    requests_logger.info(Event("refusal", line))


def trace_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


MEANINGS = {
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    403: "The route needs an admin key.",
    404: "The named object does not exist.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    422: "Valid, but it can never be served by this engine.",
    431: "The headers are too large.",
    429: "This API key has reached its limit of concurrent requests; `Retry-After` says when to retry.",
    500: "An internal error; retrying does not help.",
    501: "A part of the API that is not enabled on this server.",
    503: "Overloaded, loading, or stopping; `Retry-After` says when to retry.",
}


class ErrorDetail(BaseModel):
    message: str = Field(description="What is wrong, and what would be right.")
    type: str
    param: str | None = Field(description="Dotted path of the field that is wrong.")
    code: int | str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# In FastAPI's format (Any: its own type). 422 is listed here so that FastAPI adds none of its own.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning} for status, meaning in MEANINGS.items()
}
