"""CORS: web pages of the origins in `allowed_origins` may call; by default none."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..config.settings import ServerSettings

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
