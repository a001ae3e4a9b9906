"""Slots for which the requests of several API keys wait on an event loop, in turn by key."""

from __future__ import annotations

import asyncio

from ...cluster.request.key_shares import KeyTurns


class KeySlots:
    """A semaphore whose slots go to the keys in turn (`KeyTurns`). Used on one event loop."""

    def __init__(self, num_slots: int, *, leaves_room: bool = False) -> None:
        self._turns = KeyTurns[asyncio.Future[None]](num_slots, leaves_room=leaves_room)

    @property
    def num_free(self) -> int:
        return self._turns.num_free

    async def acquire(self, key: str | None) -> None:
        """Wait for a slot, and hold it until `release`. A cancelled wait holds none."""
        granted = asyncio.get_running_loop().create_future()
        self._turns.add(key, granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not self._turns.remove(key, granted):
                self.release(key)
            raise

    def release(self, key: str | None) -> None:
        self._turns.release(key)
        self._grant()

    def _grant(self) -> None:
        while (granted := self._turns.take()) is not None:
            if not granted.done():  # otherwise its wait was cancelled, and releases the slot
                granted.set_result(None)
