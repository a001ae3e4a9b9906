"""Keeps an engine's drafter running: detects its end, starts another one, and reports its health.

    serving ──process ends, or session lost──▶ away ──another has loaded, or it answers again──▶ offered
       ▲                                                                                            │
       └──────────────────── the target takes a session: generation + 1 ────────────────────────────┘

A thread of its own waits and starts. The engine's thread reads `health`, forwards offers to the workers and
reports what they say about the drafter. It retries forever with growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time

from ....cluster.config import EngineConfig
from ....cluster.errors import EngineDeadError, MantaError
from ....cluster.step.executor import DrafterHealth
from ..base.control_messages import DrafterAt, DrafterReport
from .drafter_process import DrafterGoneError, DrafterProcess, DrafterSource

logger = logging.getLogger(__name__)

WATCH_S = 0.25  # polling interval for events that wake no sleeper
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
ANSWER_WITHIN_S = 20.0  # a drafter that does not answer within this time is killed
_START_ATTEMPTS = 3  # at the first start: a shared drafter may be about to exit


class DrafterSupervisor:
    """Keeps the drafter of one engine running. `config`: the engine's, with absolute paths."""

    def __init__(self, source: DrafterSource, config: EngineConfig) -> None:
        self._source, self._config = source, config
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: DrafterProcess | None = None
        self._generation = 0
        self._is_running = self._is_ready = False
        self._session_lost = False
        self._offer: DrafterAt | None = None
        self._offer_time_s, self._pause_s = 0.0, FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._watch, name="manta-drafter-keeper", daemon=True)

    def start(self) -> DrafterAt:
        """Wait for the first drafter. Raises like `DrafterSource.start`, and EngineDeadError."""
        for attempt in range(_START_ATTEMPTS):
            try:
                self._process = self._source.start(self._config)
                break
            except DrafterGoneError as error:
                if attempt == _START_ATTEMPTS - 1:
                    raise EngineDeadError(f"The drafter died while starting: {error}") from None
        assert self._process is not None
        return DrafterAt(0, self._process.facts.address)

    def begin(self) -> None:
        """Start to watch, once the target has taken its first session."""
        self._is_running = self._is_ready = True
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.facts.pid if process is not None else None

    @property
    def health(self) -> DrafterHealth:
        with self._lock:
            return DrafterHealth(self._is_running and self._is_ready, self._generation)

    # Called on the engine's thread.

    def take_offer(self) -> DrafterAt | None:
        """Return a new drafter's address, which the workers need before the next plan."""
        with self._lock:
            offer, self._offer = self._offer, None
            return offer

    def report(self, report: DrafterReport) -> None:
        with self._lock:
            if report.generation != self._generation or self._offer is not None:
                return  # it is about a drafter that has been replaced
            self._is_ready = report.ready
            self._session_lost = report.lost

    def use(self, config: EngineConfig) -> None:
        """Switch to another drafter, which loads in the background."""
        with self._lock:
            self._config = config
            self._is_running = False
            process, self._process = self._process, None
        if process is not None and not self._source.is_shared:
            process.kill()

    def close(self) -> None:
        """Kill the drafter if it is the engine's own. Idempotent; callable from any thread."""
        self._closing.set()
        with self._lock:
            process, self._process = self._process, None
        if process is not None and not self._source.is_shared:
            process.kill()

    def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    # The watching thread.

    def _watch(self) -> None:
        while not self._closing.is_set():
            process = self._process
            try:
                if process is not None and not process.has_ended(WATCH_S) and not self._session_lost:
                    continue
                self._replace(process)
            # Ray itself is gone and with it the workers, which the executor reports
            except Exception as error:
                if not self._closing.is_set():
                    logger.warning("stopped watching the drafter: %s", error)
                return

    def _replace(self, process: DrafterProcess | None) -> None:
        """Find a drafter, preferably the old one if it still answers, and offer it."""
        with self._lock:
            self._is_running = False
        if process is not None and not self._closing.is_set():
            logger.warning(
                "lost the drafter (process %d); decoding continues without drafts", process.facts.pid
            )
        begin_s, config = time.monotonic(), self._config
        if self._session_lost and process is not None and not process.has_ended(0.0):
            self._pause(begin_s)
        drafter = self._reconnect(process) or self._start_another()
        if drafter is None:
            return
        with self._lock:
            is_wanted = not self._closing.is_set() and config is self._config
            if is_wanted:
                self._process = drafter
                self._generation += 1
                self._offer = DrafterAt(self._generation, drafter.facts.address)
                self._session_lost, self._is_running, self._is_ready = False, True, True
                self._offer_time_s = time.monotonic()
        if is_wanted:
            elapsed_s = time.monotonic() - begin_s
            logger.info(
                "a drafter is available again after %.1f s (process %d)", elapsed_s, drafter.facts.pid
            )
        elif not self._source.is_shared:
            drafter.kill()

    def _pause(self, now_s: float) -> None:
        """Pause before reconnecting to a running drafter, the longer the shorter the last connection."""
        held_s = now_s - self._offer_time_s
        self._pause_s = FIRST_PAUSE_S if held_s > LONGEST_PAUSE_S else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._closing.wait(self._pause_s)

    def _reconnect(self, process: DrafterProcess | None) -> DrafterProcess | None:
        """Return the process of a lost session if it answers; otherwise kill it."""
        if process is None or process.has_ended(0.0):
            return None
        if process.answers(ANSWER_WITHIN_S):
            return process
        if not self._closing.is_set():
            logger.warning("the drafter does not answer; starting another one")
        process.kill()
        return None

    def _start_another(self) -> DrafterProcess | None:
        """Start another drafter, however long it takes; None when closing."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                process = self._source.start(self._config)
            except (DrafterGoneError, MantaError) as error:
                logger.warning("could not start a drafter (%s); retrying in %g s", error, pause_s)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            return process
        return None
