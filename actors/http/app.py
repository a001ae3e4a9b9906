"""The FastAPI application of one engine. Served by Ray Serve (`replica.py`), or by any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Lifespan

from ... import __version__
from ..batch.service import BatchService
from ..batch.storage import Storage
from ..checkpoints import target_folder
from ..engine import AsyncEngine
from ..telemetry import StatsMirror, Telemetry
from .batches import batch_routes
from .chat import chat_routes
from .completions import completion_routes
from .cors import allow_origins
from .defaults import GenerationDefaults
from .documentation import RESPONSES
from .errors import install_handlers
from .files import file_routes
from .frontend import Frontend
from .gate import Gate
from .messages.errors import MessagesLayer
from .messages.routes import message_routes
from .models import model_routes
from .operations import operation_routes
from .responses.routes import response_routes
from .settings import ServerSettings
from .tokenization import tokenization_routes
from .traffic import Traffic


def create_app(
    engine: AsyncEngine,
    settings: ServerSettings,
    *,
    replica: str = "0",
    mirror: StatsMirror | None = None,
    traffic: Traffic | None = None,
    echo_request_id: bool = True,
    max_requests: int | None = None,
) -> FastAPI:
    """Wire the routes to a started engine.

    Args:
        engine: started; whoever started it closes it.
        settings: of the front.
        replica: named in log lines and metrics.
        mirror: also gets the engine's figures now and then.
        traffic: counts the requests under way, for whoever must know.
        echo_request_id, max_requests: see `Gate`.
    """
    traffic = traffic or Traffic()
    telemetry = Telemetry(engine, settings.model_names(engine.config.model)[0], replica, mirror)
    frontend = Frontend(engine, settings, _defaults(engine, settings), telemetry)
    batches = _batches(frontend)
    forever = [telemetry.report_forever, *([batches.work_forever] if batches else [])]
    app = FastAPI(title="Manta", version=__version__, lifespan=_lifespan(forever), responses=RESPONSES)
    generation = (completion_routes, chat_routes, response_routes, message_routes)
    for routes in (*generation, model_routes, tokenization_routes):
        app.include_router(routes(frontend))
    app.include_router(operation_routes(frontend, traffic))
    for routes in (file_routes, batch_routes):
        app.include_router(routes(batches))
    install_handlers(app)
    app.add_middleware(
        Gate,
        settings=settings,
        telemetry=telemetry,
        traffic=traffic,
        replica=replica,
        echo_request_id=echo_request_id,
        max_requests=max_requests,
    )
    app.add_middleware(MessagesLayer)
    allow_origins(app, settings)
    return app


def _defaults(engine: AsyncEngine, settings: ServerSettings) -> GenerationDefaults:
    if settings.generation_config == "openai":
        return GenerationDefaults()
    return GenerationDefaults.load(target_folder(engine.config))


def _batches(frontend: Frontend) -> BatchService | None:
    settings = frontend.settings
    if settings.batch_storage is None:
        return None
    storage = Storage.open(settings.batch_storage, field="batch_storage")
    return BatchService(
        storage,
        frontend.engine,
        frontend.defaults,
        frontend.names,
        max_lines=settings.max_batch_lines,
        chat=frontend.chat,
        count_rows=frontend.telemetry.count_batch_rows,
    )


def _lifespan(forever: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Lifespan[FastAPI]:
    """What runs beside the requests, as long as the application does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each()) for each in forever]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return lifespan
