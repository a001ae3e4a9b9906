"""Request ids: the client's own if it is valid, else a new one; returned in `X-Request-Id`."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.types import Scope

from ....cluster.request.caller import REQUEST_ID
from ...system.log_setup import about_request

ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(REQUEST_ID)


def new_id(prefix: str = "") -> str:
    return prefix + secrets.token_hex(16)


def acceptable_id(client_id: object) -> str | None:
    """Return a client's id if it fits a header and a log line."""
    return client_id if isinstance(client_id, str) and _REQUEST_ID.fullmatch(client_id) else None


def take_request_id(scope: Scope, body: Any) -> None:  # Any: JSON
    """Use the body's id for log and response, unless a gateway or Serve has fixed the header's."""
    state = scope["state"]
    client_id = acceptable_id(body.get("request_id")) if isinstance(body, dict) else None
    if client_id is not None and state["may_rename"] and "origin" not in state:
        state["request_id"] = client_id
        about_request(client_id)
