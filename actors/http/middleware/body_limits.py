"""What a request's body may take: so many bytes, so much time, and its share of what is kept of all of them.

Asked by `request_gate.py`, knows no route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from ..config.settings import ServerSettings

# A body may come slowly, but must come: a connection that is silent for so long is closed, and one whose body
# takes longer than that and than its size at the least rate allows.
GRACE_S = 20.0
LEAST_BYTES_PER_S = 32 * 1024
# Unfinished bodies of a process take so many times the largest one together.
BUDGET_BODIES = 8
# Of each body so many bytes are not counted: short bodies come whatever long ones do.
UNCOUNTED_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A body that is being received.

    Attributes:
        num_bytes: of it that have come.
        dropped: the budget had no place for it.
        waiting: bounds the wait for its next bytes.
    """

    began_s: float
    num_bytes: int = 0
    dropped: bool = False
    waiting: asyncio.Timeout | None = field(default=None, repr=False)

    @property
    def counted(self) -> int:
        return max(0, self.num_bytes - UNCOUNTED_BYTES)


class BodyBudget:
    """The memory of one process for bodies that have not come to their end. On the event loop.

    Where it is exceeded, the body that has held most for longest (bytes times seconds) is dropped. So slow
    and long bodies give way to quick and short ones.

    Args:
        max_bytes: of all unfinished bodies together, beyond UNCOUNTED_BYTES of each.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # counted
        self._open: set[_Unfinished] = set()

    @contextmanager
    def body(self) -> Iterator[_Unfinished]:
        """One body; its share is given back at the end, or by `release`."""
        body = _Unfinished(time.monotonic())
        self._open.add(body)
        try:
            yield body
        finally:
            self.release(body)

    def release(self, body: _Unfinished) -> None:
        """The body is whole, dropped or given up. Idempotent."""
        if body in self._open:
            self._open.discard(body)
            self.num_bytes -= body.counted

    def receive(self, body: _Unfinished, num_bytes: int) -> None:
        """More of a body has come. Drops bodies, this one perhaps, until the budget holds."""
        if body not in self._open:
            return
        before = body.counted
        body.num_bytes += num_bytes
        self.num_bytes += body.counted - before
        while self.num_bytes > self.max_bytes:
            self._drop()

    def _drop(self) -> None:
        now_s = time.monotonic()
        victim = max(self._open, key=lambda body: body.counted * (now_s - body.began_s))
        self.release(victim)
        victim.dropped = True
        if victim.waiting is not None:
            victim.waiting.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """How large a body may be, and what is said of a larger one."""

    max_bytes: int
    said: str

    @classmethod
    def of(cls, settings: ServerSettings, name: str, beside: int = 0) -> BodyLimit:
        """The limit that a setting states; `beside` it a form needs some bytes."""
        size = getattr(settings, name)
        return cls(size + beside, f"The body is larger than {size} bytes, this server's {name}.")

    @contextmanager
    def applied(
        self, receive: Receive, arrived: Callable[[], None], budget: BodyBudget | None = None
    ) -> Iterator[Receive]:
        """A `receive` that raises HTTPException: 413 once the body is too large, 408 once it is too late, 503
        once all unfinished bodies together are too large.

        Args:
            arrived: called when the last of the body has come; may raise it, too.
            budget: None where the body is not kept in memory.
        """
        budget = budget or BodyBudget(self.max_bytes)
        with budget.body() as body:
            yield self._limited(receive, arrived, budget, body)

    def _limited(
        self, receive: Receive, arrived: Callable[[], None], budget: BodyBudget, body: _Unfinished
    ) -> Receive:
        done = False

        async def limited() -> Message:
            nonlocal done
            if done:  # what follows is the client's leaving, whenever that is
                return await receive()
            allowed_s = GRACE_S + body.num_bytes / LEAST_BYTES_PER_S - (time.monotonic() - body.began_s)
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
                raise HTTPException(413, self.said, _CLOSE)
            budget.receive(body, count)
            if body.dropped:
                raise _dropped(budget)
            if done:
                budget.release(body)
                if body.num_bytes:
                    arrived()
            return message

        return limited


# What is left of the body is not read.
_CLOSE = {"Connection": "close"}


def _too_late(count: int) -> HTTPException:
    return HTTPException(
        408,
        f"The body came too slowly: after {count} bytes no more of it came in time. Send it at "
        f"{LEAST_BYTES_PER_S} bytes a second or faster, without a pause of {GRACE_S:g} s.",
        _CLOSE,
    )


def _dropped(budget: BodyBudget) -> HTTPException:
    return HTTPException(
        503,
        f"The unfinished bodies of all requests have {budget.max_bytes} bytes together, and this one held "
        "most for longest. Send it again, faster or later.",
        _CLOSE,
    )
