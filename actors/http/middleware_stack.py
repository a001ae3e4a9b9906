"""What stands around the routes of every application of ours, an engine's and a gateway's, in one order.

browsers' rules (cors.py) ─▶ errors in Anthropic's shape ─▶ the gate ─▶ errors in OpenAI's shape ─▶ routes
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from .anthropic.errors import MessagesLayer
from .config.settings import ServerSettings
from .middleware.cors import allow_origins
from .middleware.inflight_requests import Traffic
from .middleware.request_gate import Observer, RequestGate
from .wire.errors import install_handlers
from .wire.rejections import Rejection, ignore


def surround(
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
    """Put the layers around an application that has its routes; the arguments are `RequestGate`'s."""
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
    )
    app.add_middleware(MessagesLayer)
    allow_origins(app, settings)


def _build_routes(app: FastAPI) -> None:
    """Build what FastAPI would build in the first request to each included router, on the event loop."""
    for route in app.routes:
        for name in ("effective_candidates", "effective_low_priority_routes"):
            if (build := getattr(route, name, None)) is not None:
                build()
