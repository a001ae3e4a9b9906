"""The Ray half of a batch job: engines on a cluster, and Ray Data handing out spans of rows.

Runs in a thread of its own, so that the driver's main thread waits for one thing only: the next event, be it
a table of results, a line for the user, the end, or a signal. With RAY_ADDRESS set (`ray job submit ... --
manta batch ...` sets it) the job joins that cluster, else it starts a Ray of its own.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

import pyarrow as pa
import ray
import ray.data

from ...actors.batch.rows import Layout
from ...actors.batch.source import Source
from ...actors.batch.survey import Survey
from ...cluster.config import EngineConfig
from ...cluster.errors import MantaError
from ..ray_session import join_or_start_ray
from .engine import BatchEngine
from .room import Room, find_room

MAX_ROWS_PER_SPAN = 16
MAX_SPANS = 8192
STOP_TIMEOUT_S = 30.0
KILL_EVERY_S = 1.0


class Phase(Enum):
    """Where the run is: connected to Ray, which took the signals over; all rows answered."""

    CONNECTED = auto()
    ANSWERED = auto()


# Results, a line for the user, a signal, why the run failed.
Event = Phase | pa.Table | str | signal.Signals | BaseException


class EngineRun:
    """Engines that answer a source. Started once; `stop` ends it whatever it is doing.

    Args:
        engines: how many, each on one node.
        model_name: reported in OpenAI responses.
    """

    def __init__(
        self,
        source: Source,
        survey: Survey,
        layout: Layout,
        config: EngineConfig,
        engines: int,
        model_name: str,
    ) -> None:
        self._source = source
        self._survey = survey
        self._layout = layout
        self._config = config
        self._engines = engines
        self._model_name = model_name
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its `put` may be called by a signal
        self._stopping = threading.Event()
        self._room: Room | None = None
        self._thread = threading.Thread(target=self._run, name="manta-batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Put an event between the others; safe in a signal handler."""
        self._events.put(event)

    def next_event(self) -> Event:
        """Wait for the next event."""
        return self._events.get()

    def stop(self) -> None:
        """End the engines and leave Ray. Returns when that is done, or has taken too long."""
        self._stopping.set()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            if self._room is not None:
                self._room.kill_engines()  # Ray Data then gives up; a no-op once the rows are all answered
            self._thread.join(KILL_EVERY_S)

    def _run(self) -> None:
        try:
            with _ray():
                self.tell(Phase.CONNECTED)
                self._answer()
                self.tell(Phase.ANSWERED)  # before Ray is left: what is answered can be written meanwhile
        except BaseException as error:  # the thread's edge: it goes to whoever waits
            self.tell(_reason(error))

    def _answer(self) -> None:
        room = find_room(self._config, self._engines, self.tell, self._stopping)
        if room is None:
            return
        self._room = room
        try:
            if not self._stopping.is_set():
                for results in self._results(room):
                    self.tell(results)
        finally:
            room.release()

    def _results(self, room: Room) -> Iterator[pa.Table]:
        """Tables of results as engines finish them."""
        _quiet_ray_data()
        rows_per_span = self._rows_per_span()
        begins = range(0, self._survey.num_rows, rows_per_span)
        ends = (min(begin + rows_per_span, self._survey.num_rows) for begin in begins)
        works = [self._survey.work((rows,)) for rows in zip(begins, ends, strict=True)]
        spans = [{"work": pickle.dumps(work)} for work in works]
        # Enough rows in flight to fill the engine while others are on their way.
        calls = max(2, math.ceil(1.25 * self._config.max_num_seqs / rows_per_span))
        config = replace(self._config, num_threads=room.claim.num_threads)
        with warnings.catch_warnings():
            # Deprecated, and without a successor in this Ray: nothing else gives each actor its own group.
            warnings.simplefilter("ignore", DeprecationWarning)
            # `from_items` alone starts no task, which would want a CPU; a block each, so that each is a call.
            answered = ray.data.from_items(spans, override_num_blocks=len(spans)).map_batches(
                BatchEngine,
                fn_constructor_args=(config, self._source, self._layout, self._model_name),
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(
                    size=self._engines,
                    max_tasks_in_flight_per_actor=calls + 1,
                    max_concurrent_calls_per_actor=calls,
                ),
                num_cpus=room.claim.actor.get("CPU", 0.0),
                num_gpus=room.claim.actor.get("GPU"),
                ray_remote_args_fn=room.next_actor,
            )
        yield from answered.iter_batches(batch_size=None, batch_format="pyarrow")

    def _rows_per_span(self) -> int:
        """Rows come back in spans: small ones, so that they come soon, but not more than Ray Data likes."""
        num_rows = self._survey.num_rows
        small = min(MAX_ROWS_PER_SPAN, self._config.max_num_seqs, max(1, num_rows // self._engines))
        return max(small, -(-num_rows // MAX_SPANS))


def _quiet_ray_data() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it prints every error that it raises


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray to run on: the one that is there, the one RAY_ADDRESS names, or a local one for this job."""
    if ray.is_initialized():
        yield
        return
    # Ray Data's actors make Ray complain at its error level about what is of no consequence here.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    join_or_start_ray(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _reason(error: BaseException) -> BaseException:
    """The error of our own tree inside Ray's wrappings, else the error itself."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, MantaError):
            return inner
        seen.add(id(inner))
        inner = getattr(inner, "cause", None) or inner.__cause__ or inner.__context__
    return error
