"""Runs the compilation of grammars in threads, so that no API key's grammars delay those of another.

Keys wait in turn (`KeySlots`) for two lanes: quick trials and grammars that compile fast, and all others. So
one key waits for at most one compilation of each other key. Each key has a budget of compile seconds: an
online request beyond it is refused, a row of a batch waits. Called by `grammar_frontend.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ...cluster.errors import EngineGoneError, OverloadedError, RateLimitError
from ...cluster.request.key_shares import KeyBudget
from ..system.key_slots import KeySlots

T = TypeVar("T")

# Two quick trials at a time and one slow one, so that slow grammars do not delay others.
NUM_QUICK, NUM_SLOW = 2, 1
# CPU seconds that a key's new grammars may take per minute: half of the slow lane.
BUDGET_S = 30.0
DEADLINE_S = 600.0  # the time limit of OpenAI's clients for a request


@dataclass(frozen=True, slots=True)
class Compilation:
    """The request for which a grammar is compiled.

    Attributes:
        field: of the request, for messages.
        owner: digest of its key (`Caller.owner`).
        deadline_s: when it stops waiting, on the event loop's clock; None: it is a batch's, and waits.
    """

    field: str
    owner: str | None = None
    deadline_s: float | None = None

    async def acquire(self, slots: KeySlots, awaited: str) -> None:
        """Wait for a slot of its key. Raises OverloadedError at the deadline."""
        try:
            async with asyncio.timeout_at(self.deadline_s):
                await slots.acquire(self.owner)
        except TimeoutError:
            raise OverloadedError(
                f"{self.field}: {awaited} for {DEADLINE_S:g} s. Retry, or make this grammar simpler.",
                param=self.field,
            ) from None


class CompileTurns:
    """The threads that compile an engine's grammars. `run` is for its event loop."""

    def __init__(self) -> None:
        self._quick = _Lane(NUM_QUICK, "manta-grammars")
        self._slow = _Lane(NUM_SLOW, "manta-slow-grammars")
        self._budget = KeyBudget(BUDGET_S)

    async def run(
        self,
        compilation: Compilation,
        work: Callable[[], tuple[T, float]],
        *,
        quick: bool,
        is_new: bool = True,
        undo: Callable[[], None] | None = None,
    ) -> T:
        """Run `work` in a thread in its key's turn, and return its result.

        `work` also returns the CPU seconds that its key pays. `is_new`: it may be some. `undo` is called if
        the request is cancelled while the work succeeds. Raises RateLimitError if the key has spent its
        budget, OverloadedError at the deadline.
        """
        lane = self._quick if quick else self._slow
        while True:
            await compilation.acquire(lane.slots, "Other grammars have been compiled")
            wait_s = self._budget.wait_s(compilation.owner, time.monotonic()) if is_new else 0.0
            if not wait_s:
                break
            lane.slots.release(compilation.owner)
            if compilation.deadline_s is not None:
                raise RateLimitError(
                    f"{compilation.field}: new grammars of this API key have taken {BUDGET_S:g} s to compile "
                    f"within a minute, the maximum. Retry in {math.ceil(wait_s)} s, or use a grammar that "
                    "was sent before: its result is kept.",
                    param=compilation.field,
                )
            await asyncio.sleep(wait_s)
        return await self._run_in_slot(lane, compilation.owner, work, undo)

    async def _run_in_slot(
        self,
        lane: _Lane,
        owner: str | None,
        work: Callable[[], tuple[T, float]],
        undo: Callable[[], None] | None,
    ) -> T:
        """Run `work`. Its slot is released when it has ended, also if its request has not waited for it."""
        loop = asyncio.get_running_loop()
        try:
            future = lane.threads.submit(work)
        except RuntimeError:
            lane.slots.release(owner)
            raise EngineGoneError("The engine of this server is stopping. Retry.") from None

        def succeeded() -> bool:
            return not future.cancelled() and future.exception() is None

        def end() -> None:
            if succeeded():
                self._budget.spend(owner, future.result()[1], time.monotonic())
            lane.slots.release(owner)

        def end_on_loop(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end)

        def undo_work(_: object) -> None:
            if undo is not None and succeeded():
                undo()

        future.add_done_callback(end_on_loop)
        try:
            return (await asyncio.wrap_future(future))[0]
        except asyncio.CancelledError:
            future.add_done_callback(undo_work)
            raise

    def submit(self, work: Callable[[], object], *, quick: bool) -> None:
        """Run short work after what the lane runs now. Thread-safe. Raises RuntimeError after `close`."""
        (self._quick if quick else self._slow).threads.submit(work)

    def close(self) -> None:
        for lane in (self._quick, self._slow):
            lane.threads.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """Threads, and a slot for each."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.slots = KeySlots(num_threads)
