"""Which web pages may ask: those of the origins that `allowed_origins` names, and by default none."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..config.settings import ServerSettings

SHOWN_HEADERS = ("X-Request-Id", "X-Ignored-Params", "Retry-After", "x-should-retry")


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Put CORS around the application where an origin is allowed; around `RequestGate`: preflights bring no
    key."""
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
        )
