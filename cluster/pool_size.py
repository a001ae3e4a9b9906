"""How many engines a batch job is worth, between the fewest and the most that it may have. Arithmetic.

Another engine is worth its start when the others would need longer for what is left than twice as long as a
start takes. Fewer are wanted only when nothing is left to hand out. Used by `jobs/batch/pool.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from .errors import ConfigError

MIN_SOON_S = 5.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The fewest and the most engines of a job at once."""

    fewest: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise ConfigError(
                f"concurrency={self} must be at least 1, and MIN:MAX with MIN no more than MAX.",
                param="concurrency",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """`4`, or `1:4`."""
        if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())):
            raise ConfigError(
                f"concurrency={text!r} is neither a number of engines, as 2, nor MIN:MAX, as 1:4.",
                param="concurrency",
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.fewest) if self.fewest == self.most else f"{self.fewest}:{self.most}"


class PoolSize:
    """What was learned of a job's pace, and the number of engines that follows from it."""

    def __init__(self, bounds: Concurrency) -> None:
        self._bounds = bounds
        self._start_s = 0.0
        self._engine_s = 0.0
        self._num_rows = 0

    def started(self, seconds: float) -> None:
        """An engine has started in that time."""
        self._start_s = max(self._start_s, seconds)

    def worked(self, engines: int, seconds: float) -> None:
        """So many engines have worked for so long."""
        self._engine_s += engines * seconds

    def answered(self, num_rows: int) -> None:
        self._num_rows += num_rows

    def wanted(self, left: int | None, engines: int, busy: int) -> int:
        """How many engines there should be.

        Args:
            left: rows in no engine's hands; None while that is not known.
            engines: that there are, or are being started.
            busy: of them, with rows in their hands.
        """
        fewest, most = self._bounds.fewest, self._bounds.most
        if left == 0:
            return min(engines, max(fewest, busy))
        there = max(fewest, min(engines, most))
        if left is None or not self._engine_s:
            return there
        soon_s = max(2 * self._start_s, MIN_SOON_S)
        rows_per_engine_s = max(self._num_rows, 1) / self._engine_s
        worth = math.ceil(left / (rows_per_engine_s * soon_s))
        return max(there, min(most, worth))
