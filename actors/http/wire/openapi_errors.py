"""Errors in the OpenAPI document: the statuses of the routes, and the common format of error bodies.

Documentation only: `errors.py` creates the bodies.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

MEANINGS = {
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    403: "An operators' route, and no admin key.",
    404: "What the request names is not here.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    422: "Valid, but it can never be served by this engine.",
    431: "The headers are too large.",
    429: "As many requests of this API key are under way as may be; `Retry-After` says when to come back.",
    500: "A fault of the server's; a retry is in vain.",
    501: "A part of the API that this server was started without.",
    503: "Overloaded, loading, or stopping; `Retry-After` says when to come back.",
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
