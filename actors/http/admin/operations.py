"""Routes for operators: /health, /ping, /version, /metrics, /load, and /receipts.

The first three need no key and are not counted. Receipts are summed from the folder that all replicas write
(`usage_store.py`): a key sees those of its tenant, an admin key all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ....cluster.errors import DrainingError, NotAllowedError, NotOfferedError, StorageError
from ....version import __version__
from ...observability.usage_store import read_receipts
from ..generation.server_context import ServerContext
from ..middleware.api_keys import caller_of
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


RECEIPTS_PATH = "/receipts"


def receipt_routes(folder: str | None, keep: Callable[[], None] | None = None) -> APIRouter:
    """`folder`: the setting `receipts`. `keep` writes receipts that are not in the folder yet."""
    router = APIRouter()

    @router.get(RECEIPTS_PATH)
    async def receipts(http: Request, day: str | None = None, tenant: str | None = None) -> Response:
        """Return the usage and savings of this key's tenant; an admin key may query all tenants."""
        if folder is None:
            raise NotOfferedError(
                "This server keeps no receipts: start it with --receipts PATH (the setting receipts).",
                param="receipts",
            )
        caller = caller_of(http.scope)
        if not caller.sees_all and caller.tenant is None:
            raise NotAllowedError(
                "Receipts belong to tenants, and this key has none: the operator adds one to the key's line, "
                "or uses an admin key."
            )
        if keep is not None:
            await asyncio.to_thread(keep)
        try:
            found = await asyncio.to_thread(read_receipts, Path(folder), day, tenant)
        except OSError as error:
            raise StorageError(f"The receipts cannot be read ({error.strerror}). Retry.") from None
        mine = [one for one in found if caller.sees_all or one["tenant"] == caller.tenant]
        return json_response({"object": "list", "data": mine})

    return router
