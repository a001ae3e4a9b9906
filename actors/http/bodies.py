"""What a request's body may take: so many bytes, and so much time. Asked by `gate.py`, knows no route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from .settings import ServerSettings

# A body may come slowly, but must come: a connection that only holds its place is closed.
GRACE_S = 20.0
LEAST_BYTES_PER_S = 4096


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

    def applied(self, receive: Receive, arrived: Callable[[], None]) -> Receive:
        """A `receive` that raises HTTPException: 413 once the body is too large, 408 once it is too late.

        Args:
            arrived: called when the last of the body has come; may raise it, too.
        """
        began_s, count, done = time.monotonic(), 0, False

        async def limited() -> Message:
            nonlocal count, done
            if done:  # what follows is the client's leaving, whenever that is
                return await receive()
            allowed_s = GRACE_S + count / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout(allowed_s - (time.monotonic() - began_s)):
                    message = await receive()
            except TimeoutError:
                raise _too_late(count) from None
            count += len(message.get("body", b""))
            done = message["type"] != "http.request" or not message.get("more_body", False)
            if count > self.max_bytes:
                raise HTTPException(413, self.said, _CLOSE)
            if done and count:
                arrived()
            return message

        return limited


# What is left of the body is not read.
_CLOSE = {"Connection": "close"}


def _too_late(count: int) -> HTTPException:
    return HTTPException(
        408,
        f"The body came too slowly: after {count} bytes no more of it came in time. Send it at "
        f"{LEAST_BYTES_PER_S} bytes a second or faster.",
        _CLOSE,
    )
