"""JSON as it comes and goes.

Bodies are parsed by orjson, which refuses what Python's parser lets through: NaN, infinities, and strings
with half a character (a lone surrogate), which no tokenizer takes.

Parsing holds Python's lock, so every stream waits for it: about 2 ms per MB of text, but 25 ms per million
numbers and far more per million strings or objects, which then are checked one by one. Long bodies are
therefore counted first, and those that consist of too many pieces are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import orjson
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .gate import take_request_id

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
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:  # Any: JSON.
        found = await parsed(await self.body())
        take_request_id(self.scope, found)
        return found


async def parsed(body: bytes) -> Any:  # Any: JSON.
    """A body of JSON; a long one is parsed beside the event loop. Raises what orjson raises, and 413."""
    if len(body) <= SHORT_BODY_BYTES:
        return orjson.loads(body)
    await asyncio.to_thread(check_pieces, body)
    return await asyncio.to_thread(orjson.loads, body)


def check_pieces(body: bytes) -> None:
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
        at = _end_of_string(body, quote + 1)


def _end_of_string(body: bytes, at: int) -> int:
    """The place after the closing quote: the next one that no odd number of backslashes stands before."""
    while True:
        quote = body.find(b'"', at)
        if quote < 0:
            return len(body)
        first = quote
        while body[first - 1] == 0x5C:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        at = quote + 1
