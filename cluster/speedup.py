"""How many times as fast as plain decoding an engine was lately, of its snapshots.

An engine sums up seconds of steps that were free to draft, and what plain decoding would have taken for their
tokens, by measured plain steps (`EngineStats`; docs/decisions/speed-up.md). Here their growth is divided. Not
where it is measured, which is `step_controller.py`. Used by `actors/telemetry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import EngineStats

MEMORY_S = 60.0  # seconds of decoding after which what was before is forgotten
LEAST_S = 0.05  # of less nothing is said


class SpeedupMeter:
    """Of one engine, asked now and then."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0)
        self._plain_s = self._taken_s = 0.0

    def ratio(self, stats: EngineStats) -> float | None:
        """Of the last minute of decoding, about; None where too little is measured."""
        plain_s, taken_s = stats.plain_s - self._last[0], stats.speculating_s - self._last[1]
        self._last = stats.plain_s, stats.speculating_s
        kept = max(0.0, 1.0 - taken_s / MEMORY_S)
        self._plain_s, self._taken_s = kept * self._plain_s + plain_s, kept * self._taken_s + taken_s
        return self._plain_s / self._taken_s if self._taken_s >= LEAST_S else None
