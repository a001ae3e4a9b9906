"""Training by the clock: how much of a time budget is used, and the learning rate that goes with it.

Progress is time spent training, summed over restarts, so that a machine of any
speed finishes on time: warm up, stay constant, decay in the last part (WSD).
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor over progress in [0, 1]."""

    warmup_steps: int = 100
    decay_from: float = 0.6
    final_factor: float = 0.03

    def factor(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if progress <= self.decay_from:
            return warm
        left = max(0.0, (1.0 - progress) / (1.0 - self.decay_from))
        return warm * (self.final_factor + (1.0 - self.final_factor) * left)


class TimeBudget:
    """Seconds of training allowed, minus those used before this process started."""

    def __init__(self, budget_s: float, used_s: float = 0.0) -> None:
        self.budget_s = budget_s
        self._used_before_s = used_s
        self._started = time.monotonic()

    @property
    def used_s(self) -> float:
        return self._used_before_s + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        return min(1.0, self.used_s / self.budget_s)
