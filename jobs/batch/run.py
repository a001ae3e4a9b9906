"""The Ray half of a batch job: a Ray to run on, and the engines on it, in a thread of their own.

The driver's main thread waits for one thing only: the next event, be it figures, a line for the user, the
end, or a signal. With RAY_ADDRESS set (`ray job submit ... -- manta batch ...` sets it) the job joins that
cluster, else it starts a Ray of its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum, auto

import ray

from ...cluster.pool_size import Concurrency
from ..ray_session import join_or_start_ray
from .messages import EngineSetup
from .pool import Done, EnginePool, Job
from .seat import reason

END_TIMEOUT_S = 30.0


class Phase(Enum):
    """How far it is: Ray has taken the signals over; the rows are known; the engines' work is durable."""

    CONNECTED = auto()
    OPENED = auto()
    LEFT = auto()


# What is done in this run, a line for the user, a signal, why the run failed.
Event = Phase | Done | str | signal.Signals | BaseException


class EngineRun:
    """Engines that answer what `opening` will bring. Started once; `end` ends it whatever it is doing."""

    def __init__(self, setup: EngineSetup, bounds: Concurrency, opening: Future[Job]) -> None:
        self._setup = setup
        self._bounds = bounds
        self._opening = opening
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its `put` may be called by a signal
        self._lock = threading.Lock()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: EnginePool | None = None
        self._thread = threading.Thread(target=self._run, name="manta-batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Put an event between the others; safe in a signal handler."""
        self._events.put(event)

    def next_event(self, timeout_s: float | None = None) -> Event:
        """Wait for the next event. Raises queue.Empty when none comes in time."""
        return self._events.get(timeout=timeout_s)

    def stop(self) -> bool:
        """Ask the engines to make durable what they have, and go: LEFT follows. False if there are none."""
        with self._lock:
            self._stopping = True
            if self._pool is None or self._loop is None:
                return False
            self._loop.call_soon_threadsafe(self._pool.stop)
            return True

    def end(self) -> None:
        """End the engines and leave Ray. Returns when that is done, or has taken too long."""
        self.stop()
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with _ray():
                self.tell(Phase.CONNECTED)
                asyncio.run(self._answer())
        except BaseException as error:  # the thread's edge: it goes to whoever waits
            self.tell(reason(error))

    async def _answer(self) -> None:
        with self._lock:
            if self._stopping:
                return
            pool = self._pool = EnginePool(self._setup, self._bounds, self.tell, self.tell)
            self._loop = asyncio.get_running_loop()
        try:
            await pool.run(asyncio.wrap_future(self._opening))
            self.tell(Phase.LEFT)
        except BaseException as error:
            self.tell(reason(error))  # before the engines are ended, which takes a while
        finally:
            with self._lock:
                self._pool = None
            await pool.close()


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray to run on: the one that is there, the one RAY_ADDRESS names, or a local one for this job."""
    if ray.is_initialized():
        yield
        return
    join_or_start_ray(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
