"""/v1/batches: files of requests that are answered with spare capacity (`batch/openai/batch_service.py`)."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ....cluster.errors import RequestError, shown, shown_name
from ...batch.openai.batch_admission import ENDPOINTS
from ...batch.openai.batch_service import BatchService
from ...engine.tenant import tenant_of
from ..middleware.api_keys import caller_of
from ..wire.json_io import JsonRoute, json_response
from .files import listed, needed, stored

MAX_BATCHES_LISTED = 100
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(BaseModel):
    """The body of a new batch.

    Attributes:
        input_file_id: of an uploaded file with one request per line.
        endpoint: the route for its lines.
        completion_window: a number of s, m, h or d; lines that are not answered by then have expired.
        metadata: stored, and returned with the batch.
    """

    model_config = ConfigDict(extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None

    def window_s(self) -> int:
        """Return the completion window in seconds. Raises RequestError if it is invalid."""
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None:
            raise RequestError(
                f"completion_window={shown(self.completion_window)} must be a number of s, m, h or d: 24h.",
                param="completion_window",
            )
        return int(found[1]) * _SECONDS[found[2]]

    def check(self) -> None:
        """Raise RequestError for an endpoint or a field that is not supported."""
        if self.endpoint not in ENDPOINTS:
            raise RequestError(
                f"endpoint={shown(self.endpoint)} is not served in batches: use {' or '.join(ENDPOINTS)}.",
                param="endpoint",
            )
        for name in self.model_extra or {}:
            name = shown_name(name)
            raise RequestError(f"{name} is not supported by this server. Leave it out.", param=name)


def batch_routes(service: BatchService | None, tenants: tuple[str, ...]) -> APIRouter:
    """Return the router of the batches; without a service its routes answer 501.

    Args:
        tenants: names that every batch may count for.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/batches")
    async def create(body: BatchRequest, http: Request) -> Response:
        """Create a batch: its requests are answered with the capacity that online requests leave."""
        batches = needed(service)
        body.check()
        caller = caller_of(http.scope)
        asker, unheeded = tenant_of(http.headers, body.metadata, caller, tenants)
        batch = await stored(
            batches.create,
            body.endpoint,
            body.input_file_id,
            body.completion_window,
            body.window_s(),
            body.metadata,
            caller,
            asker.tenant,
        )
        batches.wake()
        ignored = {} if unheeded is None else {"X-Ignored-Params": unheeded}
        return json_response(batch.as_openai(), headers=ignored)

    @router.get("/v1/batches")
    async def list_batches(
        http: Request, limit: int = Query(20, ge=1, le=MAX_BATCHES_LISTED), after: str | None = None
    ) -> Response:
        """List the batches of this key, newest first."""
        caller = caller_of(http.scope)
        page = await stored(needed(service).batches.list, caller, limit=limit, after=after)
        return json_response(listed(page))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(http: Request, batch_id: str) -> Response:
        """Return a batch and its progress."""
        batch = await stored(needed(service).batches.get, batch_id, caller_of(http.scope))
        return json_response(batch.as_openai())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(http: Request, batch_id: str) -> Response:
        """Cancel a batch; existing answers are kept."""
        batch = await stored(needed(service).batches.cancel, batch_id, caller_of(http.scope))
        needed(service).wake()
        return json_response(batch.as_openai())

    return router
