"""Serves one generation request with one or more replicas until the client has its whole response.

    choose ─▶ attempt ─┬─ whole response, or stream to its end ─▶ done
       ▲               ├─ 503: full or draining ────────────────┐
       │               └─ the engine or process died ───────────┤
       └── with the generated tokens, if they were reported ◀───┘

After a death the request is a suspect: its next attempt waits for a turn, and is the last one if that replica
dies, too.

No part of a response is sent twice. A request with tokens that replicas do not report (such as several
completions) moves to another replica as long as nothing was sent; after that it ends with an error event.
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
from yarl import URL

from ...cluster.errors import EngineDeadError, MantaError, OverloadedError
from ...cluster.request.request import MAX_SEED
from ..http.generation.resume_origin import ORIGIN_HEADER, TOLD_HEADER, ResumeOrigin
from ..http.middleware.api_keys import KeyShares, caller_of
from ..http.middleware.inflight_requests import Traffic
from ..http.wire.errors import (
    ClientGoneError,
    ends_with_engine_death,
    error_response,
    is_engine_death,
    log_if_ours,
)
from ..http.wire.json_io import JsonObject
from ..http.wire.rejections import logged_elsewhere
from ..http.wire.sse import DONE, KEEP_ALIVE, Ending, unless_gone
from .gateway_metrics import GatewayFigures
from .isolation import Isolation, SuspectRequest
from .replica_set import Fleet, Member
from .routing_hints import RoutingHints
from .stream_resume import ToldStream
from .upstream_client import Upstream, path_of, request_headers, response_headers

logger = logging.getLogger(__name__)

# Seconds that a started stream waits for a replica that can continue it, and between two looks.
PATIENCE_S = 60.0
LOOK_S = 0.2
KEEP_ALIVE_S = 15.0
# Bytes kept from the end of a stream in another API's format; they contain the event of a failure.
LAST_WORDS_BYTES = 1024
# Time limit for checking whether a silent replica still listens.
LISTEN_S = 1.0
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
# Errors after which the replica certainly has not received the request.
UNTAKEN = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True, slots=True)
class Parts:
    fleet: Fleet
    upstream: Upstream
    figures: GatewayFigures
    traffic: Traffic
    isolation: Isolation
    key_shares: KeyShares


class Generation(Response):
    """The response to a generation request; the request runs when Starlette sends the response.

    Args:
        http: the request; its body has been read.
        ending: how streams of the route's API end.
    """

    def __init__(self, parts: Parts, http: Request, body: bytes, asked: RoutingHints, ending: Ending) -> None:
        self.background = None
        self._parts = parts
        self._http = http
        self._body = body
        self._asked = asked
        self._ending = ending
        self._model = parts.fleet.find(asked.model)
        self._origin = ResumeOrigin(
            id=secrets.token_hex(16), created_s=int(time.time()), seed=secrets.randbelow(MAX_SEED)
        )
        self._told = ToldStream()
        self._refused: set[str] = set()  # names of the replicas that refused
        self._refusal: Response | None = None  # the last refusal
        self._case = SuspectRequest(parts.isolation, http.url.path, body)
        self._begun = False  # the client has the head of its response
        self._raw = False  # the client also has output whose tokens are unknown here
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
        with self._parts.key_shares.take(
            caller_of(self._http.scope).owner, self._asked.num_completions, num_replicas
        ):
            await self._take_through()

    async def _take_through(self) -> None:
        while True:
            await self._case.identify()
            self._case.check()
            if not self._begun:  # also after a refusal by the last replica, which was draining
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
        """Return the next replica to try; None if all ready ones have refused. A started stream waits."""
        asked, told_s = self._asked, time.monotonic()
        there_s = told_s  # when a replica could last have taken the request, apart from waiting for a turn
        with self._parts.isolation.turn(self._model, self._case) as turn:
            while True:
                try:
                    member = turn.take(asked.chain, asked.session, without=self._refused)
                except OverloadedError:
                    if not self._begun and self._refusal is not None:
                        return None
                    leaving = self._parts.traffic.draining
                    if not self._begun or leaving or time.monotonic() - there_s > PATIENCE_S:
                        raise
                    self._refused.clear()
                    await asyncio.sleep(LOOK_S)
                else:
                    if member is not None:
                        break
                    await turn.wait(LOOK_S)
                    there_s = time.monotonic()
                if self._begun and time.monotonic() - told_s > KEEP_ALIVE_S:
                    told_s = time.monotonic()
                    await self._write(KEEP_ALIVE)
        if self._origin.attempt:
            count = self._parts.figures.resumed if self._begun else self._parts.figures.retried
            count(self._model.names[0])
        return member

    async def _attempt(self, member: Member) -> bool:
        with self._case.attempt(member):
            return await self._ask(member)

    async def _ask(self, member: Member) -> bool:
        """Send the request to a replica and relay its response. Return False to try another replica.

        Raises:
            EngineDeadError: the replica died after sending output that no other replica can continue.
            PoisonousRequestError: replicas died under this request.
        """
        request_id = self._http.scope["state"]["request_id"]
        headers = [*request_headers(self._http), (ORIGIN_HEADER, self._origin.header())]
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
            if await died_with_requests(member, error):
                await self._record_death(member)
                self._case.check()
        if self._raw:
            raise EngineDeadError("The replica that served this request has died. Retry.")
        return False

    async def _record_death(self, member: Member) -> None:
        await self._case.record_death(member, self._http.scope["state"]["request_id"])

    async def _relay(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        """Relay a response to the client. Return False if another replica is to be tried."""
        if response.status == 503:
            refusal = await _whole(response)
            await self._refuse(member, refusal, _error_of(refusal))
            return False
        if response.content_type != "text/event-stream":
            await self._answer(await _whole(response))
            self._case.complete()
            return True
        if TOLD_HEADER not in response.headers:
            return await self._relay_raw(member, response)
        return await self._relay_told(member, response)

    async def _relay_raw(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        end = b""
        async for data in response.content.iter_any():
            await self._begin(response)
            self._raw = True
            await self._write(data)
            end = (end + data)[-LAST_WORDS_BYTES:]
        await self._finish(b"")
        if ends_with_engine_death(end) and member.record.state != "draining":
            self._parts.fleet.mark_broken(member)
            await self._record_death(member)
        else:
            self._case.complete()
        return True

    async def _relay_told(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        told = self._told
        before = told.num_tokens
        async for data in response.content.iter_any():
            if piece := told.feed(data):
                self._case.tell(told.num_tokens - before)
                await self._begin(response)
                await self._write(piece)
            if told.error is not None:
                return await self._end_or_refuse(member, told.error)
            if told.ended:
                self._case.complete()
                await self._begin(response)
                await self._finish(DONE)
                await response.read()  # so that the connection can be reused
                return True
        raise aiohttp.ClientPayloadError("the stream ended before the completion")

    async def _end_or_refuse(self, member: Member, error: JsonObject) -> bool:
        """Handle a stream that the replica ended with an error. Return False if another replica continues."""
        if error.get("code") == 503:
            await self._refuse(member, error_response(EngineDeadError(error["message"])), error)
            return False
        body = orjson.dumps({"error": error})
        await self._answer(Response(body, error["code"], media_type="application/json"))
        return True

    async def _refuse(self, member: Member, refusal: Response, error: JsonObject) -> None:
        """Record that a replica does not serve the request: it is full, draining, or its engine died."""
        self._refused.add(member.name)
        self._refusal = refusal
        if is_engine_death(error) and member.record.state != "draining":
            self._parts.fleet.mark_broken(member)
            await self._record_death(member)
            self._case.check()

    # Writing to the client.

    async def _answer(self, response: Response) -> None:
        """Send a replica's whole response; in a started stream, send its body as the final event."""
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
        """Write to the client. Blocks while the client reads slowly, which pauses the replica
        (back-pressure).
        """
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _finish(self, data: bytes) -> None:
        await self._write(data, more=False)


async def died_with_requests(member: Member, error: BaseException) -> bool:
    """Return whether a broken connection means that the replica's process died or hangs with its requests.

    False for a draining replica, or one that never received the request. After silence (TimeoutError) the
    node may have been lost, in which case its socket no longer accepts connections; if it still does, the
    process hangs.
    """
    if isinstance(error, UNTAKEN) or member.record.state == "draining":
        return False
    return not isinstance(error, TimeoutError) or await _listens(URL(member.record.url))


async def _listens(url: URL) -> bool:
    try:
        async with asyncio.timeout(LISTEN_S):
            _, writer = await asyncio.open_connection(url.host, url.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _error_of(refusal: Response) -> JsonObject:
    try:
        error = orjson.loads(bytes(refusal.body))["error"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return {}
    return error if isinstance(error, dict) else {}


async def _whole(response: aiohttp.ClientResponse) -> Response:
    found = Response(await response.read(), response.status)
    length = [header for header in found.raw_headers if header[0] == b"content-length"]
    found.raw_headers = [*response_headers(response.headers), *length]
    return found
