"""Errors in Anthropic's format: `{"type": "error", "error": {"type", "message"}, ...}`.

Errors are created in OpenAI's format; on these routes their bodies are rewritten on the way out, where that
API's request-id header is added, too. `middleware_stack.py` gives the rewriting to `RequestGate`.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from ..wire.errors import public_error
from ..wire.json_io import JsonObject
from ..wire.sse import named_event

ROUTES = "/v1/messages"
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str, request_id: str | None = None) -> JsonObject:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: JsonObject = {"type": "error", "error": {"type": kind, "message": message}}
    return error if request_id is None else {**error, "request_id": request_id}


def lost_message(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    public = public_error(error)
    return named_event(anthropic_error(public.status, public.message))


class ErrorRewriter:
    """Forwards a response, with error bodies converted from OpenAI's format to Anthropic's."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None  # of an error, held back until its body is complete
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if request_id := self._scope.get("state", {}).get("request_id"):
                MutableHeaders(scope=message)["request-id"] = request_id
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_failure(self._start)

    async def _send_failure(self, start: Message) -> None:
        headers = MutableHeaders(scope=start)
        body = _rewritten(self._body, start["status"], headers.get("request-id"))
        if body is not self._body:
            headers["content-type"] = "application/json"
            headers["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _rewritten(body: bytes, status: int, request_id: str | None) -> bytes:
    """Return the rewritten body; unchanged if not in OpenAI's format, as a replica's may be."""
    try:
        found: Any = orjson.loads(body)  # Any: JSON
    except orjson.JSONDecodeError:
        return body
    if not isinstance(found, dict) or "type" in found or not isinstance(found.get("error"), dict):
        return body
    return orjson.dumps(anthropic_error(status, str(found["error"].get("message")), request_id))
