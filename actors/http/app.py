"""The FastAPI application of one engine. Served by Ray Serve (`actors/replica.py`) or an ASGI server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.types import Lifespan

from ...version import __version__
from ..batch.dataset.storage import Storage
from ..batch.openai.batch_service import BatchService
from ..capture.collector import open_capture
from ..checkpoints.checkpoint_paths import target_folder
from ..checkpoints.model_card import sample_prompt
from ..checkpoints.published_drafters import speculation_advice
from ..engine.async_engine import AsyncEngine
from ..engine.lossless_audit import LosslessAudit
from ..observability.telemetry import MetricsMirror, RequestTelemetry
from ..tokenization.generation_config import GenerationDefaults
from .admin.explain import explain_routes
from .admin.operations import operation_routes
from .anthropic.routes import message_routes
from .batch_api.routes import batch_routes, file_routes
from .config.settings import ServerSettings
from .generation.server_context import ServerContext
from .generation.tracing import Tracing, open_tracing
from .middleware.request_gate import RequestGate, Traffic
from .middleware_stack import add_middleware
from .openai.models import model_routes
from .openai.routes import chat_routes, completion_routes
from .openai.tokenization import tokenization_routes
from .responses.routes import response_routes
from .ui import ui_routes
from .wire.errors import RESPONSES, Rejection
from .wire.json_io import JsonObject

logger = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine,
    settings: ServerSettings,
    *,
    replica: str = "0",
    mirror: MetricsMirror | None = None,
    traffic: Traffic | None = None,
    echo_request_id: bool = True,
    max_requests: int | None = None,
) -> FastAPI:
    """Create the application of a started engine, which the caller closes.

    `mirror` also gets the engine's stats periodically. `traffic` counts the requests in flight, so that the
    caller can wait for them. `echo_request_id`, `max_requests`: see `RequestGate`.
    """
    traffic = traffic or Traffic()
    name = settings.model_names(engine.config.model)[0]
    telemetry = RequestTelemetry(
        engine, name, replica, mirror, settings.max_metric_labels, categories=settings.categories
    )
    share, audit = settings.lossless_audit, None
    if share:
        audit = LosslessAudit(engine, share, telemetry.count_audit)
    capture = open_capture(engine.config, settings, telemetry.count_captured)
    tracing = open_tracing(settings, replica)
    observers = telemetry, audit, tracing, capture
    server = ServerContext(engine, settings, _defaults(engine, settings), *observers)
    logger.info("answers to conversations are read with %s", server.chat)
    batches = _batches(server)
    workers = [each.work_forever for each in (audit, batches, capture) if each is not None]
    forever = [telemetry.report_forever, *workers]
    app = FastAPIOffline(
        title="Manta",
        version=__version__,
        lifespan=_lifespan(forever, tracing),
        responses=RESPONSES,
        static_url="/docs/assets",
    )
    for routes_of, tag in (
        (completion_routes, "OpenAI"),
        (chat_routes, "OpenAI"),
        (response_routes, "OpenAI"),
        (message_routes, "Anthropic"),
        (model_routes, "Models and tokens"),
        (tokenization_routes, "Models and tokens"),
    ):
        app.include_router(_summarized(routes_of(server)), tags=[tag])

    async def metrics_text() -> bytes:
        return telemetry.render()

    def load_now() -> JsonObject:
        stats = engine.stats()
        kv_usage = round(stats.kv_usage, 4)
        return {"running": stats.running, "waiting": stats.waiting, "kv_usage": kv_usage}

    for routes, tag in (
        (operation_routes(traffic, engine.check_health, metrics_text, load_now), "Operation"),
        (explain_routes(engine, replica), "Operation"),
        (file_routes(batches), "Batches"),
        (batch_routes(batches, settings.tenants), "Batches"),
    ):
        app.include_router(_summarized(routes), tags=[tag])
    if settings.ui:

        def first_prompt() -> str | None:
            return sample_prompt(target_folder(engine.config))

        advice = f"No speculation: {speculation_advice(engine.config.model)}"
        app.include_router(
            ui_routes(
                batches=batches is not None,
                prompt=first_prompt,
                speculative_config=engine.config.speculative_config,
                advice=advice,
            )
        )
    gate = partial(
        RequestGate,
        settings=settings,
        telemetry=telemetry,
        traffic=traffic,
        replica=replica,
        echo_request_id=echo_request_id,
        max_requests=max_requests,
        on_refusal=partial(_refused, telemetry, tracing),
    )
    add_middleware(app, settings, gate)
    return app


def _summarized(routes: APIRouter) -> APIRouter:
    """Take the summaries that /docs shows from the docstrings' first lines, not from names of functions."""
    for route in routes.routes:
        if isinstance(route, APIRoute):
            route.summary = route.description.partition("\n")[0].rstrip(".")
    return routes


def create_check_app(engine: AsyncEngine, replica: str) -> FastAPI:
    """Return an application with /v1/completions alone, for the ready check; nothing is counted."""
    settings = ServerSettings()
    telemetry = RequestTelemetry(engine, settings.model_names(engine.config.model)[0], replica)
    app = FastAPI(openapi_url=None)
    app.include_router(completion_routes(ServerContext(engine, settings, GenerationDefaults(), telemetry)))
    gate = partial(RequestGate, settings=settings, telemetry=telemetry, traffic=Traffic(), replica=replica)
    add_middleware(app, settings, gate)
    return app


def _refused(telemetry: RequestTelemetry, tracing: Tracing | None, refusal: Rejection) -> None:
    if refusal.error is not None:
        telemetry.count_rejection(refusal.error)
    if tracing is not None:
        tracing.refuse(refusal)


def _defaults(engine: AsyncEngine, settings: ServerSettings) -> GenerationDefaults:
    found = GenerationDefaults.of_source(settings.generation_config, engine.config)
    return found.overridden(settings.override_generation_config)


def _batches(server: ServerContext) -> BatchService | None:
    settings = server.settings
    if settings.batch_storage is None:
        return None
    storage = Storage.open(settings.batch_storage, field="batch_storage", private=True)
    return BatchService(
        storage,
        server.engine,
        server.defaults,
        server.names,
        max_lines=settings.max_batch_lines,
        max_stored_bytes=settings.max_stored_bytes,
        chat=server.chat,
        count_lines=server.telemetry.count_batch_lines,
    )


def _lifespan(
    forever: Sequence[Callable[[], Coroutine[Any, Any, None]]], tracing: Tracing | None
) -> Lifespan[FastAPI]:
    """Run background tasks while the application runs, then send the last spans."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each()) for each in forever]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    return lifespan
