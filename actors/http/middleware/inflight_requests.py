"""Counts the HTTP requests in flight, except those to open paths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    def __init__(self) -> None:
        self.open = 0  # requests that have begun, without a completely sent response
        self.draining = False  # the server takes no new requests; /health reports it
        self._none_open = asyncio.Event()
        self._none_open.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request, from its first byte to its last."""
        self.open += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._none_open.set()

    async def ended(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._none_open.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
