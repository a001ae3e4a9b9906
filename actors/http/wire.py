"""JSON as it comes and goes.

Bodies are parsed by orjson, which refuses what Python's parser lets through: NaN, infinities, and strings
with half a character (a lone surrogate), which no tokenizer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

JsonObject: TypeAlias = dict[str, Any]  # Any: JSON.


def json_response(body: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


class JsonRoute(APIRoute):
    """A route whose body is parsed by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:  # Any: JSON.
        return orjson.loads(await self.body())
