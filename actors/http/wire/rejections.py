"""A request that no engine answered: which one, with what status and why; its line in the log.

A request that reaches the engine is logged by its run (`telemetry.py`), one that is passed on by the replica
that answers it: those say so (`logged_elsewhere`). No line holds what a client wrote: of a reason what stands
in quotes is left out, where `errors.shown` puts all that is the client's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from ....cluster.errors import MantaError, printable, without_values
from ...system.log_setup import Event
from ..config.settings import OPEN_PATHS

logger = logging.getLogger("manta.requests")

_PLAIN_PATH = re.compile(r"[\w.-]{1,100}", re.A)  # what declared fields look like
MAX_REASON = 300
MAX_PARAM = 100
TRACE_HEADERS = ("traceparent", "tracestate")


class Rejection(NamedTuple):
    """A request that went no further.

    Attributes:
        request_id: the client's, or ours for it.
        route: as it is declared; None where there is none.
        param: the field that is to blame.
        reason: without what the client wrote.
        seconds: from the request's arrival to its answer's end.
        error: of our tree, where it was one.
        trace_headers: as the client sent them.
    """

    request_id: str | None
    method: str
    route: str | None
    status: int
    param: str | None
    reason: str | None
    seconds: float
    error: MantaError | None
    trace_headers: Mapping[str, str]


class _Noted(NamedTuple):
    param: str | None = None
    reason: str | None = None
    error: MantaError | None = None


def ignore(refusal: Rejection) -> None:
    """For who needs no more than the log's line."""


def note(scope: Scope, error: MantaError | str) -> None:
    """Remember why the request is refused."""
    ours = None if isinstance(error, str) else error
    message, param = (error, None) if isinstance(error, str) else (error.message, error.param)
    if param and not _PLAIN_PATH.fullmatch(param):  # its name is the client's
        message = message.replace(param, "...")
    reason = printable(without_values(message)[:MAX_REASON])
    scope.setdefault("state", {})["refusal"] = _Noted(param and param[:MAX_PARAM], reason, ours)


def logged_elsewhere(scope: Scope) -> None:
    """This request has, or gets, a line of another's."""
    scope.setdefault("state", {})["logged"] = True


def refusal_of(scope: Scope, status: int, seconds: float) -> Rejection | None:
    """What is to be told of a request, if it has failed here. Of probes that are refused nothing is."""
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
    told = ("request_id", "method", "route", "status", "param", "reason")
    line = {name: getattr(refusal, name) for name in told}
    logger.info(Event("refusal", **line, e2e_ms=round(1000 * refusal.seconds, 1), replica=replica))


def trace_headers(headers: Headers) -> dict[str, str]:
    """What a client says of the trace that its request is a part of."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
