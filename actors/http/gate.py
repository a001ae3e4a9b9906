"""The outermost layer: request ids, API keys, body limits, and an answer for whatever nobody caught.

Plain ASGI, so that streams pass through untouched. It knows one endpoint: the one that takes files.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..telemetry import Telemetry
from .errors import INTERNAL, json_error
from .protocol import REQUEST_ID
from .settings import ServerSettings
from .traffic import Traffic

logger = logging.getLogger(__name__)

UPLOADS = "/v1/files"
FORM_BYTES = 64 * 1024  # of an upload, beside its file
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
_REQUEST_ID = re.compile(REQUEST_ID)


def new_id(prefix: str = "") -> str:
    return prefix + secrets.token_hex(16)


def use_request_id(http: Request, asked: str | None) -> str:
    """The id under which the request is logged and answered; the body's wins over the header's."""
    if asked is not None:
        http.scope["state"]["request_id"] = asked
    return http.scope["state"]["request_id"]


class Gate:
    """Wraps the application; see the module. `echo_request_id` is off where Serve's proxy does it."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        telemetry: Telemetry,
        traffic: Traffic,
        echo_request_id: bool,
    ) -> None:
        self._app = app
        self._traffic = traffic
        self.echo_request_id = echo_request_id
        self._keys = [_digest(key) for key in settings.api_keys]
        self._limit = _Limit.of(settings, "max_request_bytes")
        self._upload_limit = self._limit
        if settings.batch_storage is not None:
            self._upload_limit = _Limit.of(settings, "max_batch_file_bytes", beside=FORM_BYTES)
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with nullcontext() if scope["path"] in OPEN_PATHS else self._traffic.request():
            await _Exchange(self, scope, receive, send).run()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        limit = self._upload_limit if scope["path"] == UPLOADS else self._limit
        refusal = self._refusal(scope, headers, limit)
        await (refusal or self._app)(scope, _limited(receive, limit), send)

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        self._telemetry.observe_http(handler, scope["method"], status, seconds)

    def _refusal(self, scope: Scope, headers: Headers, limit: _Limit) -> Response | None:
        if self._keys and scope["path"] not in OPEN_PATHS and not self._knows(headers.get("authorization")):
            return json_error(401, "Send a valid API key: `Authorization: Bearer <key>`.")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit.max_bytes:
            return json_error(413, limit.said)
        return None

    def _knows(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        return scheme.lower() == "bearer" and any(hmac.compare_digest(given, k) for k in self._keys)


class _Exchange:
    """One request and its response on the way through the gate."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate = gate
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status: int | None = None
        asked = Headers(scope=scope).get("x-request-id", "")
        self._state: dict[str, Any] = scope.setdefault("state", {})  # Any: Starlette's open state
        self._state["request_id"] = asked if _REQUEST_ID.fullmatch(asked) else new_id()

    async def run(self) -> None:
        begin_s = time.monotonic()
        try:
            await self._gate.serve(self._scope, self._receive, self._forward)
        except Exception:  # the process's edge: log once, answer properly
            logger.exception("request %s failed", self._state["request_id"])
            if self._status is None:
                await json_error(500, INTERNAL)(self._scope, self._receive, self._forward)
        finally:
            self._gate.observe(self._scope, self._status or 499, time.monotonic() - begin_s)

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._gate.echo_request_id:
                MutableHeaders(scope=message)["X-Request-Id"] = self._state["request_id"]
        await self._send(message)


@dataclass(frozen=True, slots=True)
class _Limit:
    """How large a body may be, and what is said of a larger one."""

    max_bytes: int
    said: str

    @classmethod
    def of(cls, settings: ServerSettings, name: str, beside: int = 0) -> _Limit:
        size = getattr(settings, name)
        return cls(size + beside, f"The body is larger than {size} bytes, this server's {name}.")


def _limited(receive: Receive, limit: _Limit) -> Receive:
    """Stop reading a body without a declared length once it is too large."""
    left = limit.max_bytes

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, limit.said)
        return message

    return limited


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
