"""The layers around the routes of an engine's and a gateway's application, in one order.

CORS ─▶ the gate ─▶ errors in OpenAI's format ─▶ routes
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .anthropic.errors import ROUTES, ErrorRewriter
from .config.settings import ServerSettings
from .middleware.request_gate import Observer, RequestGate, Traffic
from .wire.errors import Rejection, ignore, install_handlers


def add_middleware(
    app: FastAPI,
    settings: ServerSettings,
    *,
    telemetry: Observer,
    traffic: Traffic,
    replica: str,
    echo_request_id: bool,
    max_requests: int | None = None,
    on_refusal: Callable[[Rejection], None] = ignore,
) -> None:
    """Add the layers after the routes. The arguments are those of `RequestGate`."""
    _build_routes(app)
    install_handlers(app)
    app.add_middleware(
        RequestGate,
        settings=settings,
        telemetry=telemetry,
        traffic=traffic,
        replica=replica,
        echo_request_id=echo_request_id,
        max_requests=max_requests,
        on_refusal=on_refusal,
        error_formats={ROUTES: ErrorRewriter},
    )
    allow_origins(app, settings)


def _build_routes(app: FastAPI) -> None:
    """Build now what FastAPI would build on the event loop at the first request."""
    for route in app.routes:
        for name in ("effective_candidates", "effective_low_priority_routes"):
            if (build := getattr(route, name, None)) is not None:
                build()


EXPOSED_HEADERS = ("X-Request-Id", "X-Ignored-Params", "Retry-After", "x-should-retry")


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Add CORS around `RequestGate`, because preflights have no key."""
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
