"""Limits on the bodies of requests: size, arrival time, and the bytes of all unfinished ones together.

`RequestGate` applies a `BodyLimit` to each request. A process has a `BodyBudget` for bodies in memory, and
one for uploads on a disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from ...system.freed_memory import FreedMemory
from ..config.settings import ServerSettings

# A connection is closed if its body is silent for this long, or takes longer than this plus its size at the
# minimum rate.
GRACE_S = 20.0
MIN_BYTES_PER_S = 32 * 1024
# After a response that did not wait for the whole body, the rest is read and discarded before the connection
# is closed: for at most LINGER_S, and until the client is silent for LINGER_IDLE_S. Closing a socket with
# unread bytes resets the connection, and the client may then lose the response (nginx: `lingering_close`).
LINGER_S = 5.0
LINGER_IDLE_S = 1.0
# Limits for all unfinished bodies of a process together, and for all uploads, in bodies of the maximum size.
BUDGET_BODIES = 8
BUDGET_UPLOADS = 4
# Bytes of each body that are not counted, so that short bodies are accepted despite long ones.
UNCOUNTED_BYTES = 64 * 1024
# The memory of an unfinished body of this size is given back to the system at once.
GIVEN_BACK_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Unfinished:
    key: str | None  # `Caller.owner`
    began_s: float
    num_bytes: int = 0  # bytes received so far
    dropped: bool = False  # the budget had no room for it
    # time-out of the wait for its next bytes
    waiting: asyncio.Timeout | None = field(default=None, repr=False)

    @property
    def counted(self) -> int:
        return max(0, self.num_bytes - UNCOUNTED_BYTES)


class BodyBudget:
    """The bytes of one process for unfinished bodies. Used on the event loop.

    When they exceed `max_bytes` (without the first UNCOUNTED_BYTES of each body), a body of the API key with
    the most bytes is dropped: the one with the largest product of bytes and age, so that slow, long bodies
    make room for quick, short ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # counted bytes
        self._open: set[_Unfinished] = set()
        self._freed = FreedMemory()

    @contextmanager
    def body(self, key: str | None = None) -> Iterator[_Unfinished]:
        """Track one body; its bytes are returned at the end, or by `release`."""
        body = _Unfinished(key, time.monotonic())
        self._open.add(body)
        try:
            yield body
        finally:
            if (body.dropped or body in self._open) and body.num_bytes >= GIVEN_BACK_BYTES:
                self._freed.give_back()
            self.release(body)

    def release(self, body: _Unfinished) -> None:
        """Return the bytes of a body that is complete, dropped or given up. Idempotent."""
        if body in self._open:
            self._open.discard(body)
            self.num_bytes -= body.counted

    def receive(self, body: _Unfinished, num_bytes: int) -> None:
        """Count received bytes, then drop bodies (perhaps this one) until the budget holds."""
        if body not in self._open:
            return
        before = body.counted
        body.num_bytes += num_bytes
        self.num_bytes += body.counted - before
        while self.num_bytes > self.max_bytes:
            self._drop()

    def _drop(self) -> None:
        now_s, by_key = time.monotonic(), Counter[str | None]()
        for body in self._open:
            by_key[body.key] += body.counted
        victims = [body for body in self._open if by_key[body.key] == max(by_key.values())]
        victim = max(victims, key=lambda body: body.counted * (now_s - body.began_s))
        self.release(victim)
        victim.dropped = True
        if victim.waiting is not None:
            victim.waiting.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class BodyLimit:
    max_bytes: int
    message: str

    @classmethod
    def of(cls, settings: ServerSettings, name: str, extra_bytes: int = 0) -> BodyLimit:
        """`extra_bytes`: for the rest of a form."""
        size = getattr(settings, name)
        return cls(size + extra_bytes, f"The body is larger than {size} bytes, this server's {name}.")

    @contextmanager
    def applied(
        self,
        receive: Receive,
        arrived: Callable[[], None],
        budget: BodyBudget | None = None,
        key: str | None = None,
    ) -> Iterator[Receive]:
        """Wrap `receive` so that it raises HTTPException when a limit is exceeded.

        The status is 413 for a body that is too large, 408 for one that is too slow, and 503 if all
        unfinished bodies together are too large. `arrived` is called when the whole body has arrived, and may
        raise HTTPException, too. `budget`: by default the body has one of its own. `key`: `Caller.owner`.
        """
        budget = budget or BodyBudget(self.max_bytes)
        with budget.body(key) as body:
            yield self._limited(receive, arrived, budget, body)

    def _limited(
        self, receive: Receive, arrived: Callable[[], None], budget: BodyBudget, body: _Unfinished
    ) -> Receive:
        done = False

        async def limited() -> Message:
            nonlocal done
            if done:  # the next message is the disconnect
                return await receive()
            if body.dropped:  # while nothing was awaited of it
                raise _dropped(budget)
            allowed_s = GRACE_S + body.num_bytes / MIN_BYTES_PER_S - (time.monotonic() - body.began_s)
            try:
                async with asyncio.timeout(min(GRACE_S, allowed_s)) as body.waiting:
                    message = await receive()
            except TimeoutError:
                raise _dropped(budget) if body.dropped else _too_late(body.num_bytes) from None
            finally:
                body.waiting = None
            count = len(message.get("body", b""))
            done = message["type"] != "http.request" or not message.get("more_body", False)
            if body.num_bytes + count > self.max_bytes:
                raise HTTPException(413, self.message, _CLOSE)
            budget.receive(body, count)
            if body.dropped:
                raise _dropped(budget)
            if done:
                budget.release(body)
                if body.num_bytes:
                    arrived()
            return message

        return limited


async def discard_rest(receive: Receive) -> None:
    """Read what the client still sends, within LINGER_S and LINGER_IDLE_S. Call before the response ends."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            more = True
            while more:
                message = await asyncio.wait_for(receive(), LINGER_IDLE_S)
                more = message["type"] == "http.request" and message.get("more_body", False)


# The rest of the body is not used: see `discard_rest`.
_CLOSE = {"Connection": "close"}


def _too_late(count: int) -> HTTPException:
    return HTTPException(
        408,
        f"The body arrived too slowly: only {count} bytes arrived in time. Send it at "
        f"{MIN_BYTES_PER_S} bytes a second or faster, without a pause of {GRACE_S:g} s.",
        _CLOSE,
    )


def _dropped(budget: BodyBudget) -> HTTPException:
    return HTTPException(
        503,
        f"The unfinished bodies of all requests exceed {budget.max_bytes} bytes, and those of this API key "
        "the most; this one was the longest and oldest. Send it again, faster or later.",
        _CLOSE,
    )
