"""The outermost layer: request ids, keys, limits, and a response for unhandled exceptions.

Plain ASGI, so that streams pass through unchanged. The only route it knows is the one for file uploads.
`request_body.py` limits the bodies.
`Traffic` counts the requests in flight, except those to open paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....cluster.errors import ENDINGS, SlowReaderError, TooManyRequestsError
from ....cluster.metrics.metric import OTHER
from ....cluster.request.caller import ID_HEADER, acceptable_id, new_id
from ...haproxy.config_rewriter import UNFINISHED, UNFINISHED_HEADER
from ...system.log_setup import current_request_id
from ..config.settings import OPEN_PATHS, ServerSettings
from ..wire.errors import INTERNAL, Rejection, ignore, json_error, log_refusal, refusal_of
from .api_keys import Keys
from .request_body import BUDGET_BODIES, BUDGET_UPLOADS, BodyBudget, BodyLimit, discard_rest

logger = logging.getLogger(__name__)

UPLOADS = "/v1/files"
FORM_BYTES = 64 * 1024  # of an upload, besides its file
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_HEADER_BYTES = 32 * 1024  # of all headers together; half of HAProxy's limit


def is_upload(method: str, path: str, headers: Headers) -> bool:
    """Return whether a body is written to a disk as it arrives; any other body is read into memory."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (method, path, content_type) == ("POST", UPLOADS, "multipart/form-data")


class Observer(Protocol):
    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None: ...


class RequestGate:
    """Wraps the application with these checks.

    Args:
        replica: name of this process in log lines.
        echo_request_id: return X-Request-Id; off where Serve does that, which knows only the header's id.
        max_requests: limit for requests in flight with complete bodies, so that slow bodies do not count.
        on_refusal: called for each request that failed before reaching an engine, except probes.
        error_formats: by path of an API with errors of its own format, what converts its responses.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        telemetry: Observer,
        traffic: Traffic,
        replica: str,
        echo_request_id: bool = True,
        max_requests: int | None = None,
        on_refusal: Callable[[Rejection], None] = ignore,
        error_formats: Mapping[str, Callable[[Scope, Send], Send]] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._error_formats = error_formats
        self._traffic = traffic
        self._replica = replica
        self.echo_request_id = echo_request_id
        self._max_requests = max_requests
        self._num_received = 0
        self._keys = Keys(settings)
        self.reader_timeout_s = settings.reader_timeout
        self._limit = BodyLimit.of(settings, "max_request_bytes")
        self._bodies = BodyBudget(BUDGET_BODIES * settings.max_request_bytes)
        self._upload_limit, self._uploads = self._limit, self._bodies
        if settings.batch_storage is not None:
            self._upload_limit = BodyLimit.of(settings, "max_batch_file_bytes", extra_bytes=FORM_BYTES)
            self._uploads = BodyBudget(BUDGET_UPLOADS * settings.max_batch_file_bytes)
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for path, rewriter in self._error_formats.items():
            if scope["path"] == path or scope["path"].startswith(path + "/"):
                send = rewriter(scope, send)
        with nullcontext() if scope["path"] in OPEN_PATHS else self._traffic.request():
            await _Exchange(self, scope, receive, send).run()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        limit, budget = self._limit, self._bodies
        if is_upload(scope["method"], scope["path"], headers):
            limit, budget = self._upload_limit, self._uploads
        given = self._keys.given(headers)
        if "caller" not in scope["state"]:  # otherwise the gateway's, from its header
            scope["state"]["caller"] = self._keys.caller(given, headers)
        refusal = self._refusal(scope, headers, given, limit)
        owner = scope["state"]["caller"].owner
        with ExitStack() as place:
            arrived = partial(self._acquire_slot, place, scope)
            limited = place.enter_context(limit.applied(receive, arrived, budget, owner))
            await (refusal or self._app)(scope, limited, send)

    def _acquire_slot(self, place: ExitStack, scope: Scope) -> None:
        """Count a request with a complete body until it ends. Raises HTTPException (503)."""
        scope["state"]["has_body"] = True
        if self._num_received == self._max_requests:
            # FastAPI reads the body, and lets only HTTPException through.
            full = TooManyRequestsError(f"{self._num_received} requests are in progress, the maximum. Retry.")
            raise HTTPException(full.status, full.message) from full
        self._num_received += 1
        place.callback(self._release_slot)

    def _release_slot(self) -> None:
        self._num_received -= 1

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else OTHER  # clients may invent methods
        self._telemetry.observe_http(handler, method, status, seconds)
        if (refusal := refusal_of(scope, status, seconds)) is not None:
            log_refusal(refusal, self._replica)
            self._on_refusal(refusal)

    def _refusal(self, scope: Scope, headers: Headers, given: bytes, limit: BodyLimit) -> Response | None:
        if (rejection := self._keys.refusal(scope["path"], given)) is not None:
            return json_error(*rejection, scope=scope)
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            reason = f"The request's headers are larger than {MAX_HEADER_BYTES} bytes together."
            return json_error(431, reason, scope=scope)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit.max_bytes:
            return json_error(413, limit.message, scope=scope)
        return None


class _Exchange:
    """One request and its response, with a bounded time of waiting for the client to read.

    A server waits for its client to read before it sends more (back-pressure). A client that reads nothing
    for `reader_timeout_s` (0: unlimited) is gone or malicious: it occupies memory and counts as a request in
    flight. There is one timer per request, none per message.
    """

    def __init__(self, gate: RequestGate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate = gate
        self._scope = scope
        self._receive = receive
        self._send = send
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[object] | None = None  # while it waits
        self._since_s = 0.0
        self._is_unfinished = False  # whether the connection is closed although the client may still send
        self._has_cut = False  # whether the response was ended early
        self._status: int | None = None
        headers = Headers(scope=scope)
        self._sends_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        client_id = acceptable_id(headers.get(ID_HEADER))
        self._state: dict[str, Any] = scope.setdefault("state", {})  # Any: Starlette's open state
        self._state["request_id"] = client_id or new_id()
        self._state["may_rename"] = gate.echo_request_id

    async def run(self) -> None:
        begin_s = time.monotonic()
        current_request_id.set(self._state["request_id"])
        try:
            await self._gate.serve(self._scope, self._receive, self._forward)
        except ENDINGS:
            raise
        except BaseException:  # top level of the process: log once, answer properly
            if self._has_cut:
                logger.warning(
                    "request %s is disconnected: its client read nothing for %g s (reader_timeout)",
                    *(self._state["request_id"], self._gate.reader_timeout_s),
                )
                return  # the server closes the connection, because the response is incomplete
            logger.exception("request %s failed", self._state["request_id"])
            if self._status is None:
                await json_error(500, INTERNAL)(self._scope, self._receive, self._forward)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._gate.observe(self._scope, self._status or 499, time.monotonic() - begin_s)

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
        elif self._is_unfinished and not message.get("more_body"):
            await self._transmit({**message, "more_body": True})
            await discard_rest(self._receive)
            message = {"type": "http.response.body"}
        await self._transmit(message)

    async def _transmit(self, message: Message) -> None:
        """Send. Raises SlowReaderError once the client has read nothing for too long."""
        if self._has_cut:
            raise self._too_slow()
        loop = asyncio.get_running_loop()
        self._since_s, sender = loop.time(), asyncio.current_task()
        self._sender = sender
        if self._timer is None and self._gate.reader_timeout_s:
            self._timer = loop.call_later(self._gate.reader_timeout_s, self._poll)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._has_cut and sender is not None and not sender.uncancel():
                raise self._too_slow() from None
            raise
        finally:
            self._sender = None

    def _begin(self, message: Message) -> None:
        """Note the status, and add the headers of this layer."""
        self._status = message["status"]
        headers = MutableHeaders(scope=message)
        del headers[ID_HEADER]  # at a gateway, the replica's
        if self._gate.echo_request_id:
            headers[ID_HEADER] = self._state["request_id"]
        if self._status in UNFINISHED and self._sends_body and "has_body" not in self._state:
            headers[UNFINISHED_HEADER] = "1"
            self._is_unfinished = headers.get("connection") == "close"

    def _poll(self) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self._gate.reader_timeout_s
        left_s = self._since_s + timeout_s - loop.time()
        if self._sender is not None and left_s <= 0.0:
            self._has_cut = True
            self._sender.cancel()
            return
        self._timer = loop.call_later(left_s if left_s > 0.0 else timeout_s, self._poll)

    def _too_slow(self) -> SlowReaderError:
        return SlowReaderError(
            f"The client read nothing of its answer for {self._gate.reader_timeout_s:g} s (reader_timeout).",
            param="reader_timeout",
        )


class Traffic:
    def __init__(self) -> None:
        self.open = 0  # requests that have begun, without a completely sent response
        self.draining = False  # the server takes no new requests; /health reports it
        self._none_open = asyncio.Event()
        self._none_open.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request, from its first byte to its last."""
        self.open += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._none_open.set()

    async def ended(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._none_open.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
