"""JSON as it comes and goes.

Bodies are parsed by orjson, which refuses what Python's parser lets through: NaN and infinities. Half a
character (a lone surrogate), which no tokenizer takes, becomes U+FFFD (`actors/tokenization/surrogates.py`).

Parsing holds Python's lock, so every stream waits for it: about 2 ms per MB of text, but 25 ms per million
numbers and far more per million strings or objects, which then are checked one by one. Long bodies are
therefore counted first, and those that consist of too many pieces are refused; the others are parsed in
slices (`incremental_json.py`) and validated beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...tokenization.surrogates import loads
from .incremental_json import Bytes, end_of_string, loads_in_slices
from .request_ids import take_request_id

JsonObject: TypeAlias = dict[str, Any]  # Any: JSON.


def json_response(body: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


# A prompt of token ids is that long at most; longer contexts come as text.
MAX_VALUES = 1 << 20
# Keys count, too: 10,000 messages, or the 1,024 prompts of a request many times over.
MAX_STRINGS_AND_CONTAINERS = 1 << 16
# A body of fewer bytes has room for neither.
SHORT_BODY_BYTES = 2 * MAX_STRINGS_AND_CONTAINERS


class JsonRoute(APIRoute):
    """A route whose body is parsed by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, model = super().get_route_handler(), None
        if self.body_field is not None:
            model = self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            model = None

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request, model))

        return handle


class _JsonRequest(Request):
    _body: bytearray

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> Bytes:  # type: ignore[override]  # who asks does not change it
        """Grown in place as its pieces come. Joining 30 MB at the end would hold the loop for as long as new
        memory of that size takes, 100 ms on some machines."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for piece in self.stream():
                body += piece
            self._body = body
        return self._body

    async def json(self) -> Any:  # Any: JSON.
        """A long body is returned as the route's model: validating it takes long, too."""
        body = await self.body()
        found = await parsed(body)
        take_request_id(self.scope, found)
        if self._model is not None and len(body) > SHORT_BODY_BYTES:
            return await asyncio.to_thread(_validated, self._model, found)
        return found


def _validated(model: type[BaseModel], found: Any) -> Any:
    """Return the model's instance, which FastAPI takes as it is. FastAPI validates again what is wrong."""
    try:
        return model.model_validate(found)
    except Exception:
        return found


async def parsed(body: Bytes) -> Any:  # Any: JSON.
    """A body of JSON; a long one is parsed beside the event loop. Raises what orjson raises, and 413."""
    if len(body) <= SHORT_BODY_BYTES:
        return loads(body)
    await asyncio.to_thread(check_pieces, body)
    return await asyncio.to_thread(loads, body, loads_in_slices)


def check_pieces(body: Bytes) -> None:
    """Refuse a body of more pieces than can be parsed without holding up the others."""
    containers = values = strings = at = 0
    while True:
        quote = body.find(b'"', at)
        end = quote if quote >= 0 else len(body)
        values += body.count(b",", at, end)
        containers += body.count(b"[", at, end) + body.count(b"{", at, end)
        if values > MAX_VALUES or strings + containers > MAX_STRINGS_AND_CONTAINERS:
            raise HTTPException(
                413,
                f"The body has more than {MAX_VALUES} values, or more than {MAX_STRINGS_AND_CONTAINERS} "
                "strings, lists and objects. Send it in several requests, or a long prompt as text.",
            )
        if quote < 0:
            return
        strings += 1
        at = end_of_string(body, quote + 1)
