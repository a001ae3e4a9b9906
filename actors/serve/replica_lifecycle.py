"""The end of a replica: Serve's word to go, a SIGTERM, or the death of its engine.

    Serve's graceful shutdown ─┐                      ┌─▶ all have ended
                               ├─▶ streams go on ─────┤
    SIGTERM ───────────────────┘   for timeout_s      └─▶ the rest get an error event and [DONE]

    the engine is dead, or a step does not end ─▶ its error events are flushed ─▶ the process ends, so that
                                                  connections are refused

Serve tells a replica's own code nothing before its streams have ended, so what Serve's object in this process
knows is looked at a few times a second. Not the front: what a client sees is `http/`'s. Made by
`actors/replica.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from ...cluster.errors import DrainingError
from ..engine.async_engine import AsyncEngine
from ..http.middleware.inflight_requests import Traffic

logger = logging.getLogger(__name__)

LOOK_S = 0.1
CLOSING_S = 0.3  # uvicorn looks ten times a second whether it is to close
FLUSH_S = 2.0  # at most, for the last words of requests whose engine is dead or whose time is up
EXIT_DEAD = 70
ENDED = "The server is stopping and this request's time is up. Send it again."


class ServeHost(Protocol):
    """Where the replica lives: what Serve's object in this process knows and does."""

    @property
    def is_leaving(self) -> bool:
        """Whether Serve has asked the replica to go."""
        ...

    def close_door(self) -> None:
        """Refuse new connections; those that are open go on. On the event loop."""
        ...

    async def leave(self) -> None:
        """Do what Serve does to a replica that is to go; returns when its requests have ended."""
        ...


class ReplicaLifecycle:
    """Watches until the end. Everything happens on the event loop that serves.

    Args:
        engine: whose streams are ended.
        traffic: HTTP requests under way.
        place: see there.
        timeout_s: that requests may go on once the replica is to go.
        exit: ends the process.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        traffic: Traffic,
        place: ServeHost,
        timeout_s: float,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._engine = engine
        self._traffic = traffic
        self._place = place
        self._timeout_s = timeout_s
        self._exit = exit

    async def watch(self) -> None:
        """Until the process ends."""
        while True:
            if not self._engine.is_alive:
                if not self._place.is_leaving:  # else Serve has closed it
                    await self._end_dead()
                return
            if self._place.is_leaving:
                await self._drain()
                return
            await asyncio.sleep(LOOK_S)

    async def obey_sigterm(self) -> None:
        """Go as if Serve had asked, and end the process."""
        if not self._place.is_leaving:  # else it is Ray that comes for what Serve has emptied
            logger.info("SIGTERM: this replica goes")
        await self._place.leave()  # `watch` sees it, and drains
        self._exit(0)

    async def _drain(self) -> None:
        """Give requests their time, and the rest their end."""
        began_s = time.monotonic()
        self._traffic.draining = True
        logger.info("draining: %d requests run, and may for %g s more", self._traffic.open, self._timeout_s)
        cut = 0
        if not await self._traffic.ended(self._timeout_s):
            cut = self._traffic.open
            self._engine.end_all(DrainingError(ENDED))
            await self._traffic.ended(FLUSH_S)
        took_s = time.monotonic() - began_s
        logger.info("drained in %.1f s: %d requests were ended before they were done", took_s, cut)
        # What a proxy that had not heard sent late has the rest of the time.
        await asyncio.sleep(max(0.0, self._timeout_s - took_s))
        self._engine.end_all(DrainingError(ENDED))

    async def _end_dead(self) -> None:
        logger.error("the engine is dead: this replica ends, for Serve to replace it")
        self._traffic.draining = True
        self._place.close_door()
        await asyncio.sleep(CLOSING_S)
        await self._traffic.ended(FLUSH_S)
        self._engine.give_up_stalled()
        self._exit(EXIT_DEAD)
