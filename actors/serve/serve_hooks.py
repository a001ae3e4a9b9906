"""Hooks into Serve's own objects in a replica's process: its shutdown state, and an ASGI wrapper before its
queue.

`ProbeBypass` wraps the HTTP server that Serve opens in a replica behind HAProxy, and Serve's own proxy, if
the environment of their processes names `middlewares` (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, as set by
`manta serve`):

* Health and metrics requests are answered before Serve's queue, so that probes do not wait.
* Serve's plain-text errors are replaced by errors in OpenAI's format.
* A request has one id, also where Serve would assign a second one.
* A rejection by a replica that is stopping, or was dead when the request arrived, gets the status that
  HAProxy asks for (`RETRY_HEADER`), upon which it tries another replica. A request during which the engine
  died is not retried, because it may be the cause.
"""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray._private import worker
from ray.serve._private import logging_utils
from ray.serve.exceptions import RayServeException
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.request.caller import ID_HEADER, acceptable_id, new_id
from ..haproxy.config_rewriter import RETRY_HEADER
from ..http.config.settings import OPEN_PATHS
from ..http.wire.errors import json_error

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_ENDS_THE_PROCESS = "raise_sys_exit_with_custom_error_message"
_OPENS = "add_port_to_grpc_server"
OVERLOADED = "The queue of this server is full. Retry."
NOT_READY = "The server is loading its models, or stopping. Retry."
STATUS_MESSAGES = {404: (503, NOT_READY), 408: (408, "The request took too long."), 503: (503, OVERLOADED)}


def middlewares() -> list[Middleware]:
    """Called by Serve in each process that listens."""
    return [Middleware(ProbeBypass)]


def proxy_listens() -> bool:
    """Return whether this node's HTTP server has our `ProbeBypass`, according to the environment."""
    return os.environ.get(CALLBACK, "").endswith(".serve.serve_hooks:middlewares")


def restore_print() -> None:
    """Restore Python's own `print` in this process.

    If RAY_SERVE_LOG_TO_STDERR is 0, as set by `manta serve`, Serve replaces `print` in a replica by one that
    writes the tuple of its arguments into any other file, also for each formatted traceback.
    """
    builtins.print = logging_utils.buildin_print


def listen_as_ray_does() -> None:
    """Make Serve's channel between replicas, which unpickles calls, listen on loopback if Ray does.

    Serve opens it on all interfaces after the replica is constructed, so call this in the constructor.
    """
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() == "127.0.0.1":
        assert hasattr(replica, _OPENS), "this version of Ray is not supported"
        setattr(replica, _OPENS, lambda server, _: add_port_to_grpc_server(server, "127.0.0.1:0"))


class RayServeHost:
    """Serve's replica object of this process. Create it in the replica's constructor."""

    def __init__(self) -> None:
        process = worker.global_worker
        self._replica: Any = process.actors[process.actor_id]._replica_impl  # Any: Serve's, not public

    @property
    def is_stopping(self) -> bool:
        return self._replica._shutting_down

    def stop_accepting(self) -> None:
        """Refuse new connections; open ones continue. Call it on the event loop."""
        self._replica._event_loop.call_soon_threadsafe(self._replica._stop_accepting_direct_ingress)

    def on_sigterm(self, callback: Callable[[], object]) -> None:
        """Call `callback`, in the main thread, on SIGTERM instead of ending at once.

        Only the main thread may set a handler, and it never leaves Ray's loop. So Ray's handler stays, and
        the function of its module that ends the process is replaced.
        """
        assert hasattr(worker, _ENDS_THE_PROCESS), "this version of Ray is not supported"
        setattr(worker, _ENDS_THE_PROCESS, lambda *_, **__: callback())

    async def exit(self) -> None:
        """Run Serve's graceful shutdown; return when the requests have ended."""
        shutdown = self._replica.perform_graceful_shutdown()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shutdown, self._replica._event_loop))


class ProbeBypass:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _one_id(scope, send)
        replica = _replica()
        if replica is not None and scope["path"] in OPEN_PATHS:
            await replica.app(scope, receive, send)
        else:
            await self._app(scope, receive, _Translated(scope, receive, send, replica))


def _one_id(scope: Scope, send: Send) -> Send:
    """Give the request a valid id, and its response either that id or the application's own."""
    client_id = acceptable_id(Headers(scope=scope).get(ID_HEADER)) or new_id()
    MutableHeaders(scope=scope)[ID_HEADER] = client_id

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[ID_HEADER] = headers.get(ID_HEADER, client_id)
        await send(message)

    return sent


def _replica() -> Any:  # Any: a class that Serve makes of ours.
    """Return the replica of this process; None in a proxy."""
    try:
        return serve.get_replica_context().servable_object
    except RayServeException:
        return None


class _Translated:
    def __init__(self, scope: Scope, receive: Receive, send: Send, replica: Any) -> None:
        self._client = (scope, receive, send)
        self._retry = Headers(scope=scope).get(RETRY_HEADER, "")
        self._replica = replica
        self._lived = self._is_alive()
        self._send = send
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            if dict(message["headers"]).get(b"content-type", b"").startswith(b"text/plain"):
                self._replaced = True
                status, text = STATUS_MESSAGES.get(message["status"], (500, "Internal server error."))
                await json_error(status, text, retryable=status == 503)(*self._client)
            elif message["status"] == 503 and self._retry.isdecimal() and self._is_untouched():
                message = {**message, "status": int(self._retry)}
        if not self._replaced:
            await self._send(message)

    def _is_untouched(self) -> bool:
        """Return whether the replica does not serve and its engine did not die during this request."""
        serves = getattr(self._replica, "serves", True)  # a gateway's replica has no engine that could die
        return not serves and (self._is_alive() or not self._lived)

    def _is_alive(self) -> bool:
        return getattr(self._replica, "is_alive", True)
