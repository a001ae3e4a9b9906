"""One generation request on its way through replicas, until the client has its answer.

    choose ─▶ attempt ─┬─ whole, or a stream to its end ─▶ done
       ▲               ├─ 503: full, draining or dead ───┐
       │               └─ the connection broke ──────────┤
       └── with what was generated, if it was told ◀─────┘

Nothing of an answer is ever sent twice. What is not told (several completions) goes elsewhere as long as
nothing has come out; after that it ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, replace

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...cluster.errors import EngineDeadError, MantaError, OverloadedError
from ...cluster.request import MAX_SEED
from ..http.errors import ClientGoneError, error_response, log_if_ours
from ..http.key_shares import KeyShares, key_of
from ..http.origin import ORIGIN_HEADER, TOLD_HEADER, Origin
from ..http.refusals import logged_elsewhere
from ..http.sse import DONE, KEEP_ALIVE, Ending, unless_gone
from ..http.traffic import Traffic
from ..http.wire import JsonObject
from .asked import Asked
from .figures import GatewayFigures
from .fleet import Fleet, Member
from .resume import ToldStream
from .upstream import Upstream, path_of, request_headers, response_headers

logger = logging.getLogger(__name__)

# A stream that has begun waits so long for a replica that can go on with it, and looks so often.
PATIENCE_S = 60.0
LOOK_S = 0.2
KEEP_ALIVE_S = 5.0
# Replicas that may die under a request without one more token: then the request may be what kills them.
MAX_DEATHS = 3
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every request of a gateway shares."""

    fleet: Fleet
    upstream: Upstream
    figures: GatewayFigures
    traffic: Traffic
    key_shares: KeyShares


class Generation(Response):
    """The response to a generation request; runs when it is sent.

    Args:
        parts: of the gateway.
        http: the request, its body read.
        body: what was read.
        asked: what it says.
        ending: of its API's streams.
    """

    def __init__(self, parts: Parts, http: Request, body: bytes, asked: Asked, ending: Ending) -> None:
        self.background = None
        self._parts = parts
        self._http = http
        self._body = body
        self._asked = asked
        self._ending = ending
        self._model = parts.fleet.find(asked.model)
        self._origin = Origin(
            id=secrets.token_hex(16), created_s=int(time.time()), seed=secrets.randbelow(MAX_SEED)
        )
        self._told = ToldStream()
        self._refused: set[str] = set()  # by these replicas
        self._refusal: Response | None = None  # the last one
        self._deaths = 0  # since the last token
        self._begun = False  # the client has the head of its response
        self._raw = False  # ... and more of it than is known here
        self._send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await unless_gone(self._http, self._run())
        except ClientGoneError:
            return
        except MantaError as error:
            if not self._begun:
                raise
            log_if_ours(error, scope)
            await self._finish(self._ending.failed(error) + self._ending.done)

    async def _run(self) -> None:
        num_replicas = len(self._parts.fleet.ready(self._model))
        with self._parts.key_shares.take(key_of(self._http.scope), self._asked.num_completions, num_replicas):
            await self._take_through()

    async def _take_through(self) -> None:
        while True:
            if not self._begun:  # also when the last one has refused, because it was to go
                await self._parts.fleet.rouse(self._model)
            member = await self._next_replica()
            if member is None:
                assert self._refusal is not None
                await self._answer(self._refusal)
                return
            if await self._attempt(member):
                return
            self._told.next_replica()
            self._origin = replace(self._origin, attempt=self._origin.attempt + 1, begun=self._told.begun)

    async def _next_replica(self) -> Member | None:
        """Who is asked next; None if all that are there have refused. A stream that has begun waits."""
        model, asked, fleet = self._model, self._asked, self._parts.fleet
        begin_s = told_s = time.monotonic()
        while True:
            try:
                member, choice = fleet.choose(model, asked.chain, asked.session, without=self._refused)
            except OverloadedError:
                now_s = time.monotonic()
                if not self._begun and self._refusal is not None:
                    return None
                leaving = self._parts.traffic.draining
                if not self._begun or leaving or now_s - begin_s > PATIENCE_S:
                    raise
                self._refused.clear()
                await asyncio.sleep(LOOK_S)
                if now_s - told_s > KEEP_ALIVE_S:
                    told_s = now_s
                    await self._write(KEEP_ALIVE)
                continue
            self._parts.figures.routed(model.names[0], choice)
            if self._origin.attempt:
                count = self._parts.figures.resumed if self._begun else self._parts.figures.retried
                count(model.names[0])
            return member

    async def _attempt(self, member: Member) -> bool:
        """Ask a replica. False if another is to be asked; raises what ends the request."""
        begun, request_id = self._told.begun, self._http.scope["state"]["request_id"]
        headers = [
            *request_headers(self._http.headers, request_id),
            (ORIGIN_HEADER, self._origin.header()),
        ]
        body, path = self._origin.prefix() + self._body, path_of(self._http)
        try:
            with member.attempt() as until_lost:
                async with (
                    until_lost,
                    self._parts.upstream.request(member, "POST", path, headers, body) as response,
                ):
                    return await self._relay(member, response)
        except BROKEN as error:
            if self._told.ended:
                await self._finish(DONE)
                return True
            logger.warning("request %s: replica %s broke off: %r", request_id, member.name, error)
            self._parts.fleet.mark_broken(member)
            return self._died(progress=len(self._told.begun.token_ids) > len(begun.token_ids))

    def _died(self, *, progress: bool) -> bool:
        """The replica died under the request: another is asked, unless that is in vain."""
        self._deaths = 1 if progress else self._deaths + 1
        if self._raw or self._deaths >= MAX_DEATHS:
            raise EngineDeadError("The replica that served this request has died. Retry.")
        return False

    async def _relay(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        """Hand an answer to the client, as `_attempt`."""
        if response.status == 503:
            self._refuse(member, await _whole(response))
            return False
        if response.content_type != "text/event-stream":
            await self._answer(await _whole(response))
            return True
        if TOLD_HEADER not in response.headers:
            await self._relay_raw(response)
            return True
        return await self._relay_told(member, response)

    async def _relay_raw(self, response: aiohttp.ClientResponse) -> None:
        async for data in response.content.iter_any():
            await self._begin(response)
            self._raw = True
            await self._write(data)
        await self._finish(b"")

    async def _relay_told(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        told = self._told
        async for data in response.content.iter_any():
            if piece := told.feed(data):
                await self._begin(response)
                await self._write(piece)
            if told.error is not None:
                return await self._end_or_refuse(member, told.error)
            if told.ended:
                await self._begin(response)
                await self._finish(DONE)
                await response.read()  # so that the connection can be used again
                return True
        raise aiohttp.ClientPayloadError("the stream ended before the completion")

    async def _end_or_refuse(self, member: Member, error: JsonObject) -> bool:
        """A replica has ended the stream: another goes on if a retry helps, else the client is told."""
        if error.get("code") == 503:
            self._refuse(member, error_response(EngineDeadError(error["message"])))
            return False
        body = orjson.dumps({"error": error})
        await self._answer(Response(body, error["code"], media_type="application/json"))
        return True

    def _refuse(self, member: Member, refusal: Response) -> None:
        self._refused.add(member.name)
        self._refusal = refusal

    # To the client.

    async def _answer(self, response: Response) -> None:
        """A whole response of a replica; in a stream that has begun, its body is the event that ends it."""
        assert self._send is not None
        if self._begun:
            await self._finish(b"data: " + bytes(response.body) + b"\n\n" + DONE)
        else:
            logged_elsewhere(self._http.scope)
            await response(self._http.scope, self._http.receive, self._send)

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        if self._begun:
            return
        assert self._send is not None
        self._begun = True
        headers = response_headers(response.headers)
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Waits while the client reads too slowly; then its replica waits, too."""
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _finish(self, data: bytes) -> None:
        await self._write(data, more=False)


async def _whole(response: aiohttp.ClientResponse) -> Response:
    found = Response(await response.read(), response.status)
    length = [header for header in found.raw_headers if header[0] == b"content-length"]
    found.raw_headers = [*response_headers(response.headers), *length]
    return found
