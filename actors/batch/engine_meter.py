"""Measures the device time of an engine and records it in results.

Each result gets what was spent since the previous one (`engine_spent` of WIRE_SCHEMA). So device time is
counted exactly once, with the rows: it adds up over runs, and a kill loses only the time of lost rows.

Not thread-safe: called on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...cluster.engine.engine_stats import EngineStats
from .row_stats import SPENT, Device, EngineTotals


class EngineMeter:
    """`began_s`: when the engine began to hold its devices."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        device: Device,
        num_devices: float,
        began_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._device: Device = device
        self._num_devices = num_devices
        self._clock = clock
        self._began_s = began_s
        self._changed_s = began_s  # time of the last start or end of a row
        self._opened_s: float | None = None  # start of the first row
        self._busy_s = 0.0  # until _changed_s
        self._stamped_s = began_s  # time of the last result
        self._stamped = dict.fromkeys(SPENT, 0.0)  # seconds until then
        self._running = self._done = 0
        self._first_row_s = self._last_row_s = 0.0  # Unix time

    def row_started(self) -> None:
        now_s = self._advance()
        if self._opened_s is None:
            self._opened_s, self._first_row_s = now_s, time.time()
        self._running += 1

    def row_ended(self, result: dict[str, Any] | None) -> None:
        """`result` receives what was spent since the previous result; it is None if the row was abandoned."""
        now_s = self._advance()
        self._running -= 1
        if result is None:
            return
        self._done += 1
        self._last_row_s = time.time()
        times = self._times(now_s, now_s)
        result["engine_spent"] = {
            name: (times[name] - self._stamped[name]) * self._num_devices for name in SPENT
        }
        self._stamped_s, self._stamped = now_s, times

    def totals(self) -> EngineTotals:
        now_s = self._advance()
        stats = self._stats()
        times = self._times(now_s, now_s if self._running else self._stamped_s)
        return EngineTotals(
            rows_done=self._done,
            rows_running=self._running,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.generation_tokens,
            num_steps=stats.num_drafts,
            num_accepted_tokens=stats.num_accepted_tokens,
            first_row_s=self._first_row_s,
            last_row_s=self._last_row_s,
            device=self._device,
            num_devices=self._num_devices,
            **{name: seconds * self._num_devices for name, seconds in times.items()},
        )

    def _advance(self) -> float:
        now_s = self._clock()
        if self._running:
            self._busy_s += now_s - self._changed_s
        self._changed_s = now_s
        return now_s

    def _times(self, now_s: float, open_until_s: float) -> dict[str, float]:
        open_s = max(0.0, open_until_s - self._opened_s) if self._opened_s is not None else 0.0
        return {"device_s": now_s - self._began_s, "open_s": open_s, "busy_s": self._busy_s}
