"""Requests that failed before reaching an engine: which one, with what status and why, and their log line.

A request that reaches the engine is logged by its run, a forwarded one by the replica that answers it;
`logged_elsewhere` marks both. Log lines contain no client text: quoted parts of a reason are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from ....cluster.errors import MantaError, printable, redact_values
from ...system.log_setup import Event
from ..config.settings import OPEN_PATHS

logger = logging.getLogger("manta.requests")

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
    logger.info(Event("refusal", **line, e2e_ms=round(1000 * refusal.seconds, 1), replica=replica))


def trace_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
