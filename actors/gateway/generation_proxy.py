"""Serves one generation request with one or more replicas until the client has its whole response.

    choose ─▶ attempt ─┬─ whole response, or stream to its end ─▶ done
       ▲               ├─ 503: full or draining ────────────────┐
       │               └─ the engine or process died ───────────┤
       └── with the generated tokens, if they were reported ◀───┘

After a death the request is a suspect: its next attempt waits for a turn, and is the last one if that replica
dies, too. No part of a response is sent twice. A request with tokens that replicas do not report (such as
several completions) moves to another replica as long as nothing was sent; after that it ends with an error
event.

A client whose connection broke, because this or another gateway has died, sends its request again with the id
of the last event that had one. The answer is then computed again up to there, unseen, and continues as after
a replica's death. A request with an `Idempotency-Key` gets the same answer each time, also a whole one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from ...cluster.errors import EngineDeadError, MantaError, OverloadedError, RequestError
from ..http.generation.resume_origin import ORIGIN_HEADER, TOKENS_HEADER
from ..http.middleware.api_keys import KeyLimits, caller_of
from ..http.middleware.request_gate import Traffic
from ..http.wire.errors import (
    ClientDisconnectedError,
    ends_with_engine_death,
    error_response,
    is_engine_death,
    log_if_internal,
    logged_elsewhere,
)
from ..http.wire.json_io import JsonObject
from ..http.wire.sse import KEEP_ALIVE, Ending, cancel_on_disconnect
from .gateway_metrics import GatewayMetrics
from .isolation import Isolation, SuspectRequest
from .replica_set import Fleet, Member
from .routing_hints import RoutingHints
from .stream_resume import (
    KEY_HEADER,
    POINT_HEADER,
    RESUMABLE_HEADER,
    ResumableStream,
    ResumePoint,
    new_origin,
    origin_of_key,
    with_id,
)
from .upstream_client import Upstream, path_of, request_headers, response_headers

logger = logging.getLogger(__name__)

# Seconds that a started stream waits for a replica that can continue it, and between two looks.
REPLICA_TIMEOUT_S = 60.0
POLL_S = 0.2
KEEP_ALIVE_S = 15.0
# Bytes kept from the end of a stream in another API's format; they contain the event of a failure.
TAIL_BYTES = 1024
# Time limit for checking whether a silent replica still listens.
LISTEN_S = 1.0
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
# Errors after which the replica certainly has not received the request.
NOT_RECEIVED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True, slots=True)
class GatewayState:
    fleet: Fleet
    upstream: Upstream
    metrics: GatewayMetrics
    traffic: Traffic
    isolation: Isolation
    key_limits: KeyLimits


class GenerationResponse(Response):
    """Runs the request when Starlette sends the response. `http`: its body has been read."""

    def __init__(
        self,
        parts: GatewayState,
        http: Request,
        body: bytes,
        hints: RoutingHints,
        ending: Ending,
    ) -> None:
        self.background = None
        self._parts = parts
        self._http = http
        self._body = body
        self._hints = hints
        self._ending = ending
        self._model = parts.fleet.find(hints.model)
        given = http.headers.get(POINT_HEADER)
        # What the client has of an earlier connection; None once the answer is computed again up to there.
        self._point = None if given is None else ResumePoint.parse(given)
        self._gives_ids = given is not None or http.headers.get(RESUMABLE_HEADER, "").lower() == "true"
        if self._point is not None:
            self._origin = self._point.origin
        elif key := http.headers.get(KEY_HEADER):
            owner = caller_of(http.scope).owner or ""
            self._origin = origin_of_key(*map(str.encode, (key, owner, http.url.path)), body)
        else:
            self._origin = new_origin()
        self._num_attempts = 0
        self._stream = ResumableStream()
        self._refused: set[str] = set()  # names of the replicas that refused
        self._refusal: Response | None = None  # the last refusal
        self._suspect = SuspectRequest(parts.isolation, caller_of(http.scope).owner, http.url.path, body)
        self._has_started = False  # the client has the head of its response
        self._raw = False  # the client also has output whose tokens are unknown here
        self._send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await cancel_on_disconnect(self._http, self._run())
        except ClientDisconnectedError:
            return
        except MantaError as error:
            if not self._has_started:
                raise
            log_if_internal(error, scope)
            await self._finish(self._ending(error))

    async def _run(self) -> None:
        num_replicas = len(self._parts.fleet.ready(self._model))
        with self._parts.key_limits.acquire(
            caller_of(self._http.scope).owner, self._hints.num_completions, num_replicas
        ):
            if self._point is not None and self._point.ended:
                await self._begin(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
                await self._finish(self._ending(None))
            else:
                await self._try_replicas()

    async def _try_replicas(self) -> None:
        while True:
            await self._suspect.identify()
            self._suspect.check()
            if not self._has_started:  # also after a refusal by the last replica, which was draining
                await self._parts.fleet.wake_model(self._model)
            member = await self._next_replica()
            if member is None:
                assert self._refusal is not None
                await self._answer(self._refusal)
                return
            if await self._attempt(member):
                return
            self._stream.next_replica()
            self._origin = replace(
                self._origin,
                attempt=self._origin.attempt + 1,
                num_events=self._stream.num_events,
                resume_state=self._stream.resume_state,
            )

    async def _next_replica(self) -> Member | None:
        """Return the next replica; None if all ready ones have refused. A started stream waits."""
        hints, keep_alive_s = self._hints, time.monotonic()
        # When a replica could last have taken the request, apart from waiting for a turn.
        there_s = keep_alive_s
        with self._parts.isolation.wait_turn(self._model, self._suspect) as attempt:
            while True:
                try:
                    member = attempt.take(hints.chain, hints.session, without=self._refused)
                except OverloadedError:
                    if not self._has_started and self._refusal is not None:
                        return None
                    draining = self._parts.traffic.draining
                    if not self._has_started or draining or time.monotonic() - there_s > REPLICA_TIMEOUT_S:
                        raise
                    self._refused.clear()
                    await asyncio.sleep(POLL_S)
                else:
                    if member is not None:
                        break
                    await attempt.wait(POLL_S)
                    there_s = time.monotonic()
                if self._has_started and time.monotonic() - keep_alive_s > KEEP_ALIVE_S:
                    keep_alive_s = time.monotonic()
                    await self._write(KEEP_ALIVE)
        if self._num_attempts:
            count = self._parts.metrics.resumed if self._has_started else self._parts.metrics.retried
            count(self._model.names[0])
        return member

    async def _attempt(self, member: Member) -> bool:
        self._num_attempts += 1
        with self._suspect.attempt(member):
            return await self._send_request(member)

    async def _send_request(self, member: Member) -> bool:
        """Send the request to a replica and relay its response. Return False to try another replica.

        Raises EngineDeadError if the replica died after output that no other can continue, and
        PoisonousRequestError if replicas died under this request.
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
            if self._stream.ended:
                await self._finish(self._ending(None))
                return True
            logger.warning("request %s: replica %s broke off: %r", request_id, member.name, error)
            self._parts.fleet.mark_broken(member)
            if await died_with_requests(member, error):
                await self._record_death(member)
                self._suspect.check()
        if self._raw:
            raise EngineDeadError("The replica that served this request has died. Retry.")
        return False

    async def _record_death(self, member: Member) -> None:
        await self._suspect.record_death(member, self._http.scope["state"]["request_id"])

    async def _relay(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        """Relay a response; False if another replica is to be tried."""
        if response.status == 503:
            refusal = await _read_response(response)
            await self._refuse(member, refusal, _error_of(refusal))
            return False
        if response.content_type != "text/event-stream":
            await self._answer(await _read_response(response))
            self._suspect.complete()
            return True
        if TOKENS_HEADER not in response.headers:
            if self._point is not None:
                raise RequestError(
                    "Last-Event-ID: this request's stream has no ids, so it cannot be resumed. Leave the "
                    "header out.",
                    param="Last-Event-ID",
                )
            return await self._relay_raw(member, response)
        return await self._relay_resumable(member, response)

    async def _relay_raw(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        end = b""
        async for data in response.content.iter_any():
            await self._begin_like(response)
            self._raw = True
            await self._write(data)
            end = (end + data)[-TAIL_BYTES:]
        await self._finish(b"")
        if ends_with_engine_death(end) and member.record.state != "draining":
            self._parts.fleet.mark_broken(member)
            await self._record_death(member)
        else:
            self._suspect.complete()
        return True

    async def _relay_resumable(self, member: Member, response: aiohttp.ClientResponse) -> bool:
        stream = self._stream
        before, keep_alive_s = stream.num_tokens, time.monotonic()
        async for data in response.content.iter_any():
            if piece := stream.feed(data):
                self._suspect.report_tokens(stream.num_tokens - before)
                await self._begin_like(response)
            if self._point is not None:  # the client has the piece
                if stream.num_tokens >= self._point.num_tokens or stream.ended:
                    stream.rewind(self._point)
                    self._point = None
                    return False  # a replica that gets these tokens continues at the client's character
                if piece and time.monotonic() - keep_alive_s > KEEP_ALIVE_S:
                    keep_alive_s = time.monotonic()
                    await self._write(KEEP_ALIVE)
            elif piece:
                await self._write(with_id(piece, stream.point(self._origin)) if self._gives_ids else piece)
            if stream.error is not None:
                return await self._end_or_refuse(member, stream.error, response)
            if stream.ended:
                self._suspect.complete()
                await self._begin_like(response)
                await self._finish(self._ending(None))
                await response.read()  # so that the connection can be reused
                return True
        raise aiohttp.ClientPayloadError("the stream ended before the completion")

    async def _end_or_refuse(
        self, member: Member, error: JsonObject, response: aiohttp.ClientResponse
    ) -> bool:
        """Handle a stream that ended with an error; False if another replica continues."""
        if error.get("code") == 503:
            await self._refuse(member, error_response(EngineDeadError(error["message"])), error)
            return False
        events = self._stream.rest() + await response.read()
        if self._has_started:
            await self._finish(events)
        else:
            body = orjson.dumps({"error": error})
            await self._answer(Response(body, error["code"], media_type="application/json"))
        return True

    async def _refuse(self, member: Member, refusal: Response, error: JsonObject) -> None:
        """Record that a replica refuses: it is full, draining, or its engine died."""
        self._refused.add(member.name)
        self._refusal = refusal
        if is_engine_death(error) and member.record.state != "draining":
            self._parts.fleet.mark_broken(member)
            await self._record_death(member)
            self._suspect.check()

    # Writing to the client.

    async def _answer(self, response: Response) -> None:
        """Send a whole response; in a started stream, its error as the final event."""
        assert self._send is not None
        if self._has_started:
            message = _error_of(response).get("message", "The server cannot continue this stream.")
            await self._finish(self._ending(RequestError(message)))
        else:
            logged_elsewhere(self._http.scope)
            await response(self._http.scope, self._http.receive, self._send)

    async def _begin_like(self, response: aiohttp.ClientResponse) -> None:
        if not self._has_started:
            await self._begin(response.status, response_headers(response.headers))

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert self._send is not None
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Blocks while the client reads slowly, which pauses the replica (back-pressure)."""
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _finish(self, data: bytes) -> None:
        await self._write(data, more=False)


async def died_with_requests(member: Member, error: BaseException) -> bool:
    """Return whether a broken connection means that the replica died or hangs with its requests.

    False for a draining replica, or one that never received the request. After silence (TimeoutError) the
    node may be lost, so that its socket accepts no connection; if it does, the process hangs.
    """
    if isinstance(error, NOT_RECEIVED) or member.record.state == "draining":
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


async def _read_response(response: aiohttp.ClientResponse) -> Response:
    found = Response(await response.read(), response.status)
    length = [header for header in found.raw_headers if header[0] == b"content-length"]
    found.raw_headers = [*response_headers(response.headers), *length]
    return found
