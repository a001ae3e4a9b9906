"""The log's line about a request that no engine answered: which one, with what status and why.

A request that reaches the engine is logged by its run (`telemetry.py`), one that is passed on by the replica
that answers it: those say so (`logged_elsewhere`). No line holds what a client wrote: of a reason what stands
in quotes is left out, where `errors.shown` puts all that is the client's.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import orjson
from starlette.types import Scope

from ...cluster.errors import MantaError
from .keys import OPEN_PATHS

logger = logging.getLogger("manta.requests")

_QUOTED = re.compile(r'"(?:\\.|[^"\\])*("|$)', re.S)
MAX_REASON = 300
MAX_PARAM = 100


def note(scope: Scope, error: MantaError | str) -> None:
    """Remember why the request is refused."""
    message, param = (error, None) if isinstance(error, str) else (error.message, error.param)
    reason = _QUOTED.sub('"..."', message)[:MAX_REASON]
    scope.setdefault("state", {})["refusal"] = {"param": param and param[:MAX_PARAM], "reason": reason}


def logged_elsewhere(scope: Scope) -> None:
    """This request has, or gets, a line of another's."""
    scope.setdefault("state", {})["logged"] = True


def log_refusal(scope: Scope, status: int, seconds: float, replica: str) -> None:
    """The line, if the request has failed here. Probes that are refused need none."""
    state: dict[str, Any] = scope.get("state", {})  # Any: Starlette's open state
    if status < 400 or state.get("logged") or scope["path"] in OPEN_PATHS:
        return
    told = state.get("refusal", {"param": None, "reason": None})
    line = {
        "request_id": state.get("request_id"),
        "method": scope["method"],
        "route": getattr(scope.get("route"), "path", None),
        "status": status,
        **told,
        "e2e_ms": round(1000 * seconds, 1),
        "replica": replica,
    }
    logger.info(orjson.dumps(line).decode())
