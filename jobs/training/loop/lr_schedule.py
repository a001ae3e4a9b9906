"""Length and progress of a run, and the learning rate schedule.

A run is limited by steps or by time. With a time limit, progress is the training time summed over restarts,
so that a machine of any speed finishes on time. The schedule is warmup, stable, decay (WSD).
"""

import time
from dataclasses import dataclass

from ....cluster.errors import ConfigError


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


@dataclass(frozen=True)
class Length:
    """Length of a run in steps or in seconds; exactly one is set.

    A run limited by steps ends with bit-identical weights whether or not it was interrupted. A run limited by
    seconds ends on time; steps repeated after an interruption use their recorded learning rate.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("Give the length of the run as steps or as time, not both.", param="steps")
        length = self.seconds if self.steps is None else self.steps
        if not length or length <= 0:
            raise ConfigError(f"The length of a run must be above 0, not {length}.", param="steps")


class TimeBudget:
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
