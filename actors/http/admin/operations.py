"""Routes for operators: /health, /ping, /version, /metrics and /load.

The first three need no key and are not counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ....cluster.errors import DrainingError
from ....version import __version__
from ..middleware.request_gate import Traffic
from ..wire.json_io import JsonObject, json_response


def operation_routes(
    traffic: Traffic,
    check_health: Callable[[], None],
    metrics_text: Callable[[], Awaitable[bytes | str]],
    load_now: Callable[[], JsonObject],
) -> APIRouter:
    """Return the routes of an engine or a gateway. `check_health` raises MantaError."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """Return 200 if the server takes requests, else an error."""
        check_health()
        if traffic.draining:
            raise DrainingError("This server is stopping. Use another one, or retry later.")
        return Response(status_code=200)

    @router.get("/version")
    async def version() -> Response:
        """Return Manta's version."""
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format; needs a key if the server has any."""
        return Response(await metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/load")
    async def load() -> Response:
        """Return how busy this server is; a route for operators."""
        # `server_load` is vLLM's: HTTP requests in flight, without the one that asks.
        return json_response({"server_load": traffic.open - 1, **load_now()})

    return router
