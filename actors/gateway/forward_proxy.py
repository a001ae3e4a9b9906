"""Forwards requests that any replica of a model can answer: files, batches, tokens, documents.

Small bodies are read first, so that the request can be sent to another replica as long as none has taken it;
safe methods (GET, HEAD, OPTIONS) are also sent again after a replica has died. Uploads are streamed once. A
request under which a replica died becomes a suspect (`isolation.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...cluster.errors import EngineDeadError
from ..http.middleware.api_keys import caller_of
from ..http.wire.errors import logged_elsewhere
from .generation_proxy import BROKEN, NOT_RECEIVED, POLL_S, GatewayState, died_with_requests
from .isolation import SuspectRequest
from .replica_set import Member, ServedModel
from .routing_hints import read_hints
from .upstream_client import Body, path_of, request_headers, response_headers

SMALL_BYTES = 1 << 20
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class ForwardedResponse(Response):
    def __init__(self, parts: GatewayState, http: Request) -> None:
        self.background = None
        self._parts = parts
        self._http = http
        self._client_failure: HTTPException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._small_body()
        model = await self._model(body)
        refused: set[str] = set()
        owner, isolation = caller_of(scope).owner, self._parts.isolation
        suspect = None if body is None else SuspectRequest(isolation, owner, self._case_name, body)
        while True:
            await self._parts.fleet.wake_model(model)
            member = await self._next_replica(model, suspect, refused)
            refused.add(member.name)
            if suspect is None:
                answered = await self._attempt(member, self._upload(), send, None)
            else:
                with suspect.attempt(member):
                    answered = await self._attempt(member, body or b"", send, suspect)
            if answered:
                return

    @property
    def _case_name(self) -> str:
        return f"{self._http.method} {path_of(self._http)}"

    async def _next_replica(
        self, model: ServedModel, suspect: SuspectRequest | None, refused: set[str]
    ) -> Member:
        if suspect is None:
            return self._parts.fleet.choose(model, without=refused)[0]
        await suspect.identify()
        with self._parts.isolation.wait_turn(model, suspect) as attempt:
            while (member := attempt.take([], None, without=refused)) is None:
                await attempt.wait(POLL_S)
        return member

    @property
    def _is_json(self) -> bool:
        return self._http.headers.get("content-type", "").startswith("application/json")

    async def _small_body(self) -> bytes | None:
        length = self._http.headers.get("content-length")
        if self._http.method in _SAFE or length == "0":
            return b""
        if self._is_json or (length is not None and int(length) <= SMALL_BYTES):
            return await self._http.body()
        return None

    async def _upload(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Records an error of the client (too large, too slow)."""
        try:
            async for data in self._http.stream():
                yield data
        except HTTPException as error:
            self._client_failure = error
            raise

    async def _model(self, body: bytes | None) -> ServedModel:
        """Return the model that a JSON body names, else the first model."""
        name = (await read_hints(self._http, body)).model if self._is_json and body else None
        return self._parts.fleet.find(name)

    async def _attempt(self, member: Member, body: Body, send: Send, suspect: SuspectRequest | None) -> bool:
        """Forward to a replica; False if it has certainly not taken the request."""
        http, has_started = self._http, False
        headers = request_headers(http)
        try:
            with member.attempt() as until_lost:
                request = self._parts.upstream.request(member, http.method, path_of(http), headers, body)
                async with until_lost, request as response:
                    has_started = True
                    logged_elsewhere(http.scope)
                    await _relay_response(response, send)
                    if suspect is not None:
                        suspect.complete()
                    return True
        except BROKEN as error:
            if self._client_failure is not None and not has_started:
                raise self._client_failure from None
            self._parts.fleet.mark_broken(member)
            if suspect is not None and await died_with_requests(member, error):
                await suspect.record_death(member, http.scope["state"]["request_id"])
                if not has_started:
                    suspect.check()
            if has_started or not (isinstance(error, NOT_RECEIVED) or http.method in _SAFE):
                raise EngineDeadError("The replica died under this request. Retry.") from error
            return False


async def _relay_response(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = response_headers(response.headers)
    if (length := response.headers.get("content-length")) is not None:
        headers.append((b"content-length", length.encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    async for data in response.content.iter_any():
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
