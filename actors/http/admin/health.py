"""What operators ask: /load, /metrics; and /health, /ping, /version, open to all and nobody's traffic."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ....cluster.errors import DrainingError
from ....version import __version__
from ..generation.server_context import ServerContext
from ..middleware.inflight_requests import Traffic
from ..wire.json_io import JsonObject, json_response


def operation_routes(frontend: ServerContext, traffic: Traffic) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """Whether requests are taken here."""
        frontend.engine.check_health()
        if traffic.draining:
            raise DrainingError("This server is stopping. Use another, or come back.")
        return Response(status_code=200)

    @router.get("/version")
    async def version() -> Response:
        """Manta's version."""
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text; asks for a key where there is one."""
        return Response(frontend.telemetry.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/load")
    async def load() -> Response:
        """How busy this server is; an operators' route."""
        stats = frontend.engine.stats()
        return json_response(
            {
                **load_figures(traffic, running=stats.running, waiting=stats.waiting),
                "kv_usage": round(stats.kv_usage, 4),
            }
        )

    return router


def load_figures(traffic: Traffic, *, running: int, waiting: int) -> JsonObject:
    """vLLM's `server_load`, the HTTP requests under way beside the one that asks; and the engine's own."""
    return {"server_load": traffic.open - 1, "running": running, "waiting": waiting}
