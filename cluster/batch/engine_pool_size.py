"""Chooses the number of engines of a batch job, between a minimum and a maximum.

Another engine is worth its start if the others would need longer for the remaining rows than twice the time
of a start. Engines are given up only when no row is left to hand out. Used by `jobs/batch/engine_pool.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from ..errors import ConfigError

MIN_SOON_S = 5.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    minimum: int = 1
    maximum: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"concurrency={self} must be at least 1, and MIN:MAX with MIN no more than MAX.",
                param="concurrency",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())):
            raise ConfigError(
                f"concurrency={text!r} is neither a number of engines, such as 2, nor MIN:MAX, such as 1:4.",
                param="concurrency",
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}:{self.maximum}"


class PoolSize:
    """Measures a job's pace, and computes the number of engines from it."""

    def __init__(self, bounds: Concurrency) -> None:
        self._bounds = bounds
        self._start_s = 0.0
        self._engine_s = 0.0
        self._num_rows = 0

    def record_startup(self, seconds: float) -> None:
        self._start_s = max(self._start_s, seconds)

    def record_work(self, engines: int, seconds: float) -> None:
        self._engine_s += engines * seconds

    def record_answered_rows(self, num_rows: int) -> None:
        self._num_rows += num_rows

    def target_size(self, num_unleased: int | None, engines: int, busy: int) -> int:
        """Return the number of engines that there should be; `busy` ones have rows."""
        minimum, maximum = self._bounds.minimum, self._bounds.maximum
        if num_unleased == 0:
            return min(engines, max(minimum, busy))
        current = max(minimum, min(engines, maximum))
        if num_unleased is None or not self._engine_s:
            return current
        soon_s = max(2 * self._start_s, MIN_SOON_S)
        rows_per_engine_s = max(self._num_rows, 1) / self._engine_s
        needed = math.ceil(num_unleased / (rows_per_engine_s * soon_s))
        return max(current, min(maximum, needed))
