"""Server-sent events in OpenAI's format: `data: {json}`, errors as events, `[DONE]` always last.

Newer APIs name their events and have an ending of their own (`Ending`). `stream` waits for the first event
before it sends a status, so that a failure before the first token has a real HTTP status. If a client
disconnects, its generator is canceled, which frees the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ....cluster.errors import ENDINGS
from ...system import event_loop
from .errors import ClientDisconnectedError, error_body, log_if_internal, public_error

T = TypeVar("T")
# Returns the last bytes of a stream; the error is None if there was none.
Ending = Callable[[BaseException | None], bytes]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Mapping[str, Any]) -> bytes:  # Any: a JSON object.
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(payload: Mapping[str, Any]) -> bytes:
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


def public_error_body(error: BaseException) -> bytes:
    public = public_error(error)
    return error_body(public.status, public.message, public.param, public.kind)


def done_ending(error: BaseException | None) -> bytes:
    return (b"" if error is None else b"data: " + public_error_body(error) + b"\n\n") + DONE


async def stream(
    events: AsyncGenerator[bytes, None],
    request: Request,
    headers: Mapping[str, str],
    keep_alive_s: float,
    ending: Ending = done_ending,
) -> EventStream:
    """Raise errors before the first event; later ones become events."""
    if keep_alive_s > 0:
        events = _with_keep_alive(events, keep_alive_s)
    try:
        first = await cancel_on_disconnect(request, anext(events, b""))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, headers, ending)


class EventStream(Response):
    """A 200 response with events and its API's ending, unless the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str], ending: Ending
    ) -> None:
        super().__init__(headers={**HEADERS, **headers}, media_type=self.media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(scope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancel(sending, gone)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        slice_end_s, failure = time.monotonic() + event_loop.TIME_SLICE_S, None
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(self._first))
            try:
                async for chunk in self._rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if time.monotonic() >= slice_end_s:  # neither sending nor the next chunk may have waited
                        await asyncio.sleep(0)
                        slice_end_s = time.monotonic() + event_loop.TIME_SLICE_S
            except ENDINGS:
                raise
            except BaseException as error:  # top level of a stream: report to the client, end properly
                log_if_internal(error, scope)
                failure = error
            await send(_body(self._ending(failure)))
            await send(_body(b"", more=False))


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnectedError if the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        await cancel(working, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _with_keep_alive(
    events: AsyncGenerator[bytes, None], interval_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the events, and a comment after each `interval_s` without one."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({pending}, timeout=interval_s))[0]:
                yield KEEP_ALIVE
            try:
                yield pending.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            await cancel(pending)
        await events.aclose()


def _body(chunk: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
