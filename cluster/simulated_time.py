"""When simulated steps end: on a target and a drafter that work one after the other, or beside each other.

A drafter beside its target (`ExecutorInfo.halves`) drafts for a step while the target verifies the one before
it, if these have no request in common:

    target    verify A     │ verify B     │ verify A     │
    drafter     draft B ─▶ │   draft A ─▶ │

Seconds count from now, and now is when the last step ended that was waited for. Used by `simulator.py` alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from .plan import IntArray, SchedulerOutput, StepTimings


class StepTimes:
    """Of one executor.

    Args:
        beside: whether the drafter works beside the target.
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._target_s = self._drafter_s = 0.0  # until they are free
        self._under_way: deque[tuple[float, IntArray]] = deque()  # when each ends, and whose it is

    def begin(self, plan: SchedulerOutput, costs: StepTimings) -> StepTimings:
        """A step is submitted; its times as the target sees them, of the drafting what it waits for."""
        apart = not any(np.isin(plan.slots, slots).any() for _, slots in self._under_way)
        begin_s = self._drafter_s if self._beside and apart else max(self._drafter_s, self._target_s)
        self._drafter_s = begin_s + costs.draft_s
        waited_s = max(self._drafter_s - self._target_s, 0.0) if costs.draft_s else 0.0
        seen = replace(costs, draft_s=waited_s)
        self._target_s += seen.total_s
        self._under_way.append((self._target_s, plan.slots))
        return seen

    def end(self) -> float:
        """Wait for the oldest step: for how long."""
        wait_s, _ = self._under_way.popleft()
        self._target_s -= wait_s
        self._drafter_s = max(self._drafter_s - wait_s, 0.0)
        self._under_way = deque((end_s - wait_s, slots) for end_s, slots in self._under_way)
        return wait_s
