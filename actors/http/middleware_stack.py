"""The layers around the routes of an engine's and a gateway's application, in one order.

CORS ─▶ the gate ─▶ errors in OpenAI's format ─▶ routes
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .anthropic.errors import ROUTES, ErrorRewriter
from .config.settings import ServerSettings
from .middleware.request_gate import RequestGate
from .wire.errors import install_handlers


def add_middleware(app: FastAPI, settings: ServerSettings, gate: Callable[..., RequestGate]) -> None:
    """Add the layers after the routes."""
    _build_routes(app)
    install_handlers(app)
    app.add_middleware(gate, error_formats={ROUTES: ErrorRewriter})
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
