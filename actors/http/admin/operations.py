"""Routes for operators: /health, /ping, /version, /metrics and /load.

The first three need no key and are not counted.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ....cluster.errors import DrainingError
from ....version import __version__
from ..generation.server_context import ServerContext
from ..middleware.request_gate import Traffic
from ..wire.json_io import JsonObject, json_response


def operation_routes(frontend: ServerContext, traffic: Traffic) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """Return 200 if the server takes requests, else an error."""
        frontend.engine.check_health()
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
        return Response(frontend.telemetry.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/load")
    async def load() -> Response:
        """Return how busy this server is; a route for operators."""
        stats = frontend.engine.stats()
        return json_response(
            {
                **load_stats(traffic, running=stats.running, waiting=stats.waiting),
                "kv_usage": round(stats.kv_usage, 4),
            }
        )

    return router


def load_stats(traffic: Traffic, *, running: int, waiting: int) -> JsonObject:
    """`server_load` is vLLM's: HTTP requests in flight, without the one that asks."""
    return {"server_load": traffic.open - 1, "running": running, "waiting": waiting}
