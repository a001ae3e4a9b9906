"""Runs one engine's steps in a thread, and commands between them. Called by `async_engine.py`.

    event loop: commands ─ inbox ─▶ step thread: plan, execute, commit ─ updates ─▶ event loop

A second thread watches the steps (`StepWatchdog`). While one does not end, the engine is not healthy and its
online streams fail; it serves again once the step has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from ...cluster.engine.engine_core import EngineCore
from ...cluster.engine.step_watchdog import TICK_S, Stall, StepWatchdog
from ...cluster.errors import EngineDeadError, EngineStalledError, MantaError
from ...cluster.step.executor import Executor, HasWorkers, SwapsDrafters
from .output_streams import OutputStreams
from .speculation_cache import SpeculationCache

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 1.0  # between checks that the thread lives, while a command is awaited
_JOIN_S = 60.0  # longest wait for the step in progress when closing


class StepThread:
    """Owns the engine core while it runs; all methods but `start` may be called from any thread.

    Args:
        loop: the event loop that gets updates and failures, in the order in which they happen.

    Attributes:
        failure: why the engine is dead; None while it is alive.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        speculation_cache: SpeculationCache,
        watch: StepWatchdog,
        streams: OutputStreams,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.failure: MantaError | None = None
        self._core, self._executor, self._speculation_cache = core, executor, speculation_cache
        self._watch, self._streams, self._loop = watch, streams, loop
        self._stall: Stall | None = None  # set while a step does not end
        self._inbox: deque[Callable[[EngineCore], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._stopping = threading.Event()  # ends the thread that watches steps
        self._thread = threading.Thread(target=self._run, name="manta-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._watch_steps, name="manta-step-watch", daemon=True).start()

    def stop(self) -> None:
        """End the steps, and wait for the one in progress. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._stopping.set()
        self.kill_stalled_workers()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_S)

    def check_health(self) -> None:
        """Raise the MantaError because of which steps do not run."""
        if self.failure is not None:
            raise self.failure
        if not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        self._executor.check_health()
        if self._stall is not None:
            raise _stalled(self._stall)

    def kill_stalled_workers(self) -> None:
        """Kill the workers if a step does not end, so that none keeps a device."""
        if self._stall is not None and isinstance(self._executor, HasWorkers):
            self._executor.kill_workers(self._stall.reason)

    def post_command(self, command: Callable[[EngineCore], None]) -> None:
        """Run a command between two steps, in the order of calls. It must not raise."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def run_between_steps(self, operation: Callable[[SwapsDrafters, EngineCore], None]) -> None:
        """Run `operation` on the step thread between two steps; raise what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.post_command(lambda core: self._run_command(core, operation, done))
        while not done.done():
            self.check_health()  # the thread of a dead engine runs no commands
            await asyncio.wait({done}, timeout=_HEALTH_INTERVAL_S)
        done.result()

    def post(self, call: Callable[..., None], *arguments: object) -> None:
        """Call something on the event loop; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    # On the step thread.

    def _run(self) -> None:
        try:
            while self._await_work():
                updates = self._core.step()
                if updates:
                    self.post(self._streams.deliver, updates)
                if time.monotonic() >= self._speculation_cache.due_s:
                    self._speculation_cache.write()
            self._speculation_cache.write()
            self._core.save_pages_in_files()
            self.failure = EngineDeadError("The engine is shutting down. Retry.")
        except MantaError as error:
            self.failure = error
        except BaseException as error:  # the thread's outermost level: every request must get an answer
            ids = self._streams.ids
            logger.exception(
                "the engine's loop failed; running requests: %s", ids, extra={"request_ids": ids}
            )
            self.failure = EngineDeadError(f"The engine failed ({type(error).__name__}). Retry.")
        self._stopping.set()
        self.post(self._streams.fail_all, self.failure)

    def _await_work(self) -> bool:
        """Run commands; sleep while there is nothing to do. False when closing."""
        with self._wake:
            while not self._closing and not self._inbox and not self._core.has_work:
                self._wake.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command(self._core)
        return not self._closing

    def _run_command(
        self,
        core: EngineCore,
        operation: Callable[[SwapsDrafters, EngineCore], None],
        done: asyncio.Future[None],
    ) -> None:
        try:
            operation(cast(SwapsDrafters, self._executor), core)  # those that compute drafts do
        except EngineDeadError:
            raise
        except MantaError as error:
            self.post(done.set_exception, error)
        else:
            self.post(done.set_result, None)

    # On the thread that watches steps.

    def _watch_steps(self) -> None:
        executor = self._executor
        stopped = executor.stopped_workers if isinstance(executor, HasWorkers) else tuple[str, ...]
        while not self._stopping.wait(TICK_S):
            stall = self._watch.check(time.monotonic(), stopped)
            if stall is None and self._stall is not None:
                self._stall = None
                logger.warning("the engine's step has ended: it serves again")
            elif stall is not None and self._stall is None:
                self._stall, ids = stall, self._streams.ids
                logger.error(
                    "the engine cannot serve: %s; running requests: %s",
                    *(stall.reason, ids),
                    extra={"request_ids": ids},
                )
                # Streams and the gateway treat it as any engine death; health probes get the reason.
                self.post(self._streams.fail_online, EngineDeadError(_stalled(stall).message))


def _stalled(stall: Stall) -> EngineStalledError:
    return EngineStalledError(f"The engine cannot serve: {stall.reason}. Retry.")
