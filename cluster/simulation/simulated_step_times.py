"""Simulated end times of steps whose target and drafter run one after the other, or concurrently.

A separate drafter (`ExecutorInfo.halves`) drafts for a step while the target verifies the one before it, if
these have no request in common:

    target    verify A     │ verify B     │ verify A     │
    drafter     draft B ─▶ │   draft A ─▶ │

Seconds count from now, which is the end of the last step that was waited for. Used by `simulated_executor.py`
only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from ..step.scheduler_output import IntArray, SchedulerOutput, StepTimings


class SimulatedStepTimes:
    """Simulates the time of one executor; `beside`: drafter and target run concurrently."""

    def __init__(self, *, beside: bool) -> None:
        self._concurrent = beside
        self._target_s = self._drafter_s = 0.0  # seconds until they are idle
        self._in_flight: deque[tuple[float, IntArray]] = deque()  # end time and slots of each step

    def begin(self, plan: SchedulerOutput, costs: StepTimings) -> StepTimings:
        """Submit a step; return its times as seen by the target, where drafting is the wait for drafts."""
        is_disjoint = not any(np.isin(plan.slots, slots).any() for _, slots in self._in_flight)
        begin_s = (
            self._drafter_s if self._concurrent and is_disjoint else max(self._drafter_s, self._target_s)
        )
        self._drafter_s = begin_s + costs.draft_s
        waited_s = max(self._drafter_s - self._target_s, 0.0) if costs.draft_s else 0.0
        timings = replace(costs, draft_s=waited_s)
        self._target_s += timings.total_s
        self._in_flight.append((self._target_s, plan.slots))
        return timings

    def end(self) -> float:
        """Wait for the oldest step; return the seconds waited."""
        wait_s, _ = self._in_flight.popleft()
        self._target_s -= wait_s
        self._drafter_s = max(self._drafter_s - wait_s, 0.0)
        self._in_flight = deque((end_s - wait_s, slots) for end_s, slots in self._in_flight)
        return wait_s
