"""Ends the response of a client that stops reading. Used by `request_gate.py`; independent of routes.

A server waits for its client to read before it sends more (back-pressure). A client that reads nothing for
too long is gone or malicious: it occupies memory and counts as a request in flight.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from ....cluster.errors import SlowReaderError


class StallGuard:
    """A `send` with a bounded waiting time, with one timer per request (none per message).

    Args:
        send: the server's.
        timeout_s: seconds that it may wait; 0: unlimited.

    Attributes:
        has_cut: whether the response was ended early.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[object] | None = None  # while it waits
        self._since_s = 0.0
        self.has_cut = False

    async def send(self, message: Message) -> None:
        """Send a message. Raises SlowReaderError once the client has read nothing for too long."""
        if self.has_cut:
            raise self._too_slow()
        loop = asyncio.get_running_loop()
        self._since_s, sender = loop.time(), asyncio.current_task()
        self._sender = sender
        if self._timer is None and self._timeout_s:
            self._timer = loop.call_later(self._timeout_s, self._look)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self.has_cut and sender is not None and not sender.uncancel():
                raise self._too_slow() from None
            raise
        finally:
            self._sender = None

    def close(self) -> None:
        """Stop the timer at the end of the request."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._since_s + self._timeout_s - loop.time()
        if self._sender is not None and left_s <= 0.0:
            self.has_cut = True
            self._sender.cancel()
            return
        self._timer = loop.call_later(left_s if left_s > 0.0 else self._timeout_s, self._look)

    def _too_slow(self) -> SlowReaderError:
        return SlowReaderError(
            f"The client read nothing of its answer for {self._timeout_s:g} s (reader_timeout).",
            param="reader_timeout",
        )
