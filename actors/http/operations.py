"""What operators ask: /health, /ping, /version and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ... import __version__
from .frontend import Frontend
from .wire import json_response


def operation_routes(frontend: Frontend) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        frontend.engine.check_health()
        return Response(status_code=200)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(frontend.telemetry.render(), media_type=CONTENT_TYPE_LATEST)

    return router
