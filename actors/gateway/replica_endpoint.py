"""A replica's endpoint for gateways: its application on a socket of its own, announced by heartbeats.

Serve's proxies do not know this socket. Requests must carry the token from the replica's heartbeats, so only
processes that can read the cluster's directory get in. Only here the headers of
`http/generation/resume_origin.py` are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.errors import UnreachableError
from ..http.generation.resume_origin import CALLER_HEADER, ORIGIN_HEADER, TOKEN_HEADER, ResumeOrigin
from ..http.middleware.api_keys import decode_caller
from ..http.wire.errors import json_error
from .replica_registry import HEARTBEAT_S, DirectoryClient, ReplicaRecord

logger = logging.getLogger(__name__)

# Longer than gateways keep an idle connection.
KEEP_ALIVE_S = 75
# Time that a draining replica still accepts requests, until every gateway knows.
STALE_REPORT_S = 3 * HEARTBEAT_S


class ReplicaEndpoint:
    """Serves an application to gateways until closed. `describe` returns the replica's current record."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        describe: Callable[[str, str, int], ReplicaRecord],
        directory: DirectoryClient,
    ) -> None:
        self._socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.token = secrets.token_hex(16)
        self._describe = describe
        self._directory = directory
        self._server = _Server(
            uvicorn.Config(
                Guard(app, self.token), log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S
            )
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._num_beats = 0
        self._draining = False

    async def open(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._tasks = [serving, asyncio.create_task(self._heartbeat_forever())]

    async def close(self) -> None:
        """Announce draining, finish running requests, then close. Idempotent."""
        if self._draining:
            return
        self._draining = True
        serving, beating = self._tasks
        await asyncio.sleep(STALE_REPORT_S)
        self._server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with contextlib.suppress(UnreachableError):
            await self._directory.deregister(self._describe(self.url, self.token, self._num_beats).replica)

    async def _heartbeat_forever(self) -> None:
        while True:
            try:
                await self._heartbeat()
            except UnreachableError as error:
                logger.warning("%s", error)
            except Exception:  # top level of a task; without heartbeats the replica gets no requests
                logger.exception("a heartbeat failed")
            await asyncio.sleep(HEARTBEAT_S)

    async def _heartbeat(self) -> None:
        self._num_beats += 1
        record = self._describe(self.url, self.token, self._num_beats)
        await self._directory.heartbeat(replace(record, state="draining") if self._draining else record)


class Guard:
    """Requires the token, and passes on what the gateway says of a request.

    Sets in `scope["state"]`: `origin`, a `ResumeOrigin` (its tokens are removed from the body), and `caller`,
    as authenticated by the gateway (the application itself checks no key).
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if not hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self._token):
                await json_error(403, "This endpoint is for gateways.")(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = decode_caller(headers.get(CALLER_HEADER))
            if (header := headers.get(ORIGIN_HEADER)) is not None:
                receive = await _with_origin(header, scope, receive)
        await self._app(scope, receive, send)


async def _with_origin(header: str, scope: Scope, receive: Receive) -> Receive:
    """Read the origin; the returned `receive` yields only the client's body."""
    count, body, more = ResumeOrigin.prefix_bytes(header), b"", True
    while len(body) < count and more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    scope.setdefault("state", {})["origin"] = ResumeOrigin.read(header, body[:count])
    headers = MutableHeaders(scope=scope)
    if length := headers.get("content-length"):
        headers["content-length"] = str(int(length) - count)
    if not count:
        return receive
    first: Message | None = {"type": "http.request", "body": body[count:], "more_body": more}

    async def receive_body() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return receive_body


class _Server(uvicorn.Server):
    """A server that leaves signals to the replica."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
