"""Requests that any replica of a model can answer, as they come and go: files, batches, tokens, documents.

Small ones are read and may be asked again elsewhere as long as no replica has taken them; uploads pass
through once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...cluster.errors import EngineDeadError
from ..http.refusals import logged_elsewhere
from .asked import read_asked
from .fleet import Member, ServedModel
from .generation import BROKEN, Parts
from .upstream import Body, path_of, request_headers, response_headers

SMALL_BYTES = 1 << 20
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Forwarded(Response):
    """A replica's response; asks when it is sent."""

    def __init__(self, parts: Parts, http: Request) -> None:
        self.background = None
        self._parts = parts
        self._http = http
        self._client_failure: HTTPException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._small_body()
        model = await self._model(body)
        refused: set[str] = set()
        while True:
            await self._parts.fleet.rouse(model)
            member, _ = self._parts.fleet.choose(model, without=refused)
            refused.add(member.name)
            if await self._attempt(member, self._upload() if body is None else body, send):
                return

    @property
    def _is_json(self) -> bool:
        return self._http.headers.get("content-type", "").startswith("application/json")

    async def _small_body(self) -> bytes | None:
        """The body, or None if it is one to be passed through."""
        length = self._http.headers.get("content-length")
        if self._http.method in _SAFE or length == "0":
            return b""
        if self._is_json or (length is not None and int(length) <= SMALL_BYTES):
            return await self._http.body()
        return None

    async def _upload(self) -> AsyncIterator[bytes]:
        """The body as it comes; that it is too large, or too slow, is no fault of the replica's."""
        try:
            async for data in self._http.stream():
                yield data
        except HTTPException as error:
            self._client_failure = error
            raise

    async def _model(self, body: bytes | None) -> ServedModel:
        """Of a JSON body that names one; any other request is for the first."""
        name = (await read_asked(self._http, body)).model if self._is_json and body else None
        return self._parts.fleet.find(name)

    async def _attempt(self, member: Member, body: Body, send: Send) -> bool:
        """Ask a replica; False if it has certainly not taken the request."""
        http, begun = self._http, False
        headers = request_headers(http)
        try:
            with member.attempt() as until_lost:
                request = self._parts.upstream.request(member, http.method, path_of(http), headers, body)
                async with until_lost, request as response:
                    begun = True
                    logged_elsewhere(http.scope)
                    await _pass(response, send)
                    return True
        except BROKEN as error:
            if self._client_failure is not None and not begun:
                raise self._client_failure from None
            self._parts.fleet.mark_broken(member)
            untaken = isinstance(error, aiohttp.ClientConnectorError) or http.method in _SAFE
            if begun or not untaken:
                raise EngineDeadError("The replica died under this request. Retry.") from error
            return False


async def _pass(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = response_headers(response.headers)
    if (length := response.headers.get("content-length")) is not None:
        headers.append((b"content-length", length.encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    async for data in response.content.iter_any():
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
