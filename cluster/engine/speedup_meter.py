"""Speed-up of an engine over plain decoding in the recent past, from its snapshots.

An engine adds up the seconds of steps that were free to draft, and the seconds of plain decoding for their
tokens, from measured plain steps (`EngineStats`; docs/decisions/speed-up.md). This module divides their
increases; `cluster/scheduler/step_controller.py` measures them. Used by `actors/observability/telemetry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine_stats import EngineStats

MEMORY_S = 60.0  # seconds of decoding after which older values are forgotten
MIN_S = 0.05  # with less than this, no value is returned
# With less than this, a log says nothing: a few answers show first plain steps and trials, not the benefit.
MIN_LOGGED_S = 30.0


class SpeedupMeter:
    def __init__(self) -> None:
        self._last = (0.0, 0.0)
        self._plain_s = self._taken_s = 0.0

    def logged_ratio(self, stats: EngineStats) -> float | None:
        """Return `ratio`; None until it covers half a minute of decoding."""
        ratio = self.ratio(stats)
        return ratio if self._taken_s >= MIN_LOGGED_S else None

    def ratio(self, stats: EngineStats) -> float | None:
        """Return the speed-up over about the last minute of decoding; None if too little was measured."""
        plain_s, taken_s = stats.plain_s - self._last[0], stats.speculating_s - self._last[1]
        self._last = stats.plain_s, stats.speculating_s
        decay = max(0.0, 1.0 - taken_s / MEMORY_S)
        self._plain_s, self._taken_s = decay * self._plain_s + plain_s, decay * self._taken_s + taken_s
        return self._plain_s / self._taken_s if self._taken_s >= MIN_S else None
