"""How many HTTP requests are under way, the operators' own aside. Counted by `request_gate.py`; on the event
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """One application's requests.

    Attributes:
        open: requests that have begun and not ended, their responses' last bytes included.
        draining: whether those are to be the last; `/health` says it.
    """

    def __init__(self) -> None:
        self.open = 0
        self.draining = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its first byte to its last."""
        self.open += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._none_open.set()

    async def ended(self, timeout_s: float) -> bool:
        """Wait until there is no request under way; False if there still is one then."""
        try:
            await asyncio.wait_for(self._none_open.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
