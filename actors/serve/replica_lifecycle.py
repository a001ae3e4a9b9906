"""The end of a replica: Serve's graceful shutdown, a SIGTERM, or the death of its engine.

    Serve's graceful shutdown ─┐                            ┌─▶ all have ended
                               ├─▶ open streams continue ───┤
    SIGTERM ───────────────────┘   for timeout_s            └─▶ the rest get an error event and [DONE]
    the engine is dead, or a step does not end ─▶ its error events are flushed ─▶ the process ends, so that
                                                  connections are refused

Serve notifies a replica's own code only after its streams have ended, so Serve's object in this process is
polled a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cluster.errors import DrainingError
from ..engine.async_engine import AsyncEngine
from ..http.middleware.request_gate import Traffic

if TYPE_CHECKING:
    from .serve_hooks import RayServeHost

logger = logging.getLogger(__name__)

POLL_S = 0.1
CLOSING_S = 0.3  # uvicorn checks ten times a second whether to close
FLUSH_S = 2.0  # upper bound, for the last events of requests whose engine is dead or whose time is up
EXIT_DEAD = 70
ENDED = "The server is stopping, and the time for running requests is over. Send it again."


@dataclass(frozen=True, slots=True)
class ReplicaLifecycle:
    """Watches a replica until its end, on the loop that serves. `_timeout_s`: for running requests."""

    _engine: AsyncEngine
    _traffic: Traffic
    _host: RayServeHost
    _timeout_s: float

    async def watch(self) -> None:
        while True:
            if not self._engine.is_alive:
                if not self._host.is_stopping:  # otherwise Serve has closed it
                    await self._end_dead()
                return
            if self._host.is_stopping:
                await self._drain()
                return
            await asyncio.sleep(POLL_S)

    async def handle_sigterm(self) -> None:
        if not self._host.is_stopping:  # otherwise Ray ends a replica that Serve has drained
            logger.info("SIGTERM: this replica stops")
        await self._host.exit()  # `watch` notices it and drains
        os._exit(0)

    async def _drain(self) -> None:
        began_s = time.monotonic()
        self._traffic.draining = True
        logger.info("draining: %d requests run and have %g s to finish", self._traffic.open, self._timeout_s)
        cut = 0
        if not await self._traffic.ended(self._timeout_s):
            cut = self._traffic.open
            self._engine.end_all(DrainingError(ENDED))
            await self._traffic.ended(FLUSH_S)
        took_s = time.monotonic() - began_s
        logger.info("drained in %.1f s: %d requests were ended before they were done", took_s, cut)
        # Use the remaining time for requests that a proxy still sends before it learns of the shutdown.
        await asyncio.sleep(max(0.0, self._timeout_s - took_s))
        self._engine.end_all(DrainingError(ENDED))

    async def _end_dead(self) -> None:
        logger.error("the engine is dead: this replica ends, for Serve to replace it")
        self._traffic.draining = True
        self._host.stop_accepting()
        await asyncio.sleep(CLOSING_S)
        await self._traffic.ended(FLUSH_S)
        self._engine.kill_stalled_workers()
        os._exit(EXIT_DEAD)
