"""Errors in the OpenAPI document: the statuses of the routes, and the format of error bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

MEANINGS = {
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    403: "The route needs an admin key.",
    404: "The named object does not exist.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    422: "Valid, but it can never be served by this engine.",
    431: "The headers are too large.",
    429: "This API key has reached its limit of concurrent requests; `Retry-After` says when to retry.",
    500: "An internal error; retrying does not help.",
    501: "A part of the API that is not enabled on this server.",
    503: "Overloaded, loading, or stopping; `Retry-After` says when to retry.",
}


class ErrorDetail(BaseModel):
    message: str = Field(description="What is wrong, and what would be right.")
    type: str
    param: str | None = Field(description="Dotted path of the field that is wrong.")
    code: int | str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# In FastAPI's format (Any: its own type). 422 is listed here so that FastAPI adds none of its own.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning} for status, meaning in MEANINGS.items()
}
