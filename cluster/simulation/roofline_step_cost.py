"""Roofline seconds of a planned step, as the cost function of a `SimulatedExecutor`.

Decoding requests are summarized by their number, total rows and mean context; prompts are one chunk. Called
by `simulated_engine.py`; the times are those of `cluster/hardware/step_time.py`.
"""

from __future__ import annotations

import numpy as np

from ..hardware.step_time import NO_CHUNK, Chunk, StepTimes
from ..step.scheduler_output import BoolArray, SchedulerOutput, StepTimings


class PlanCost:
    """Estimates the seconds of a step, with its parts one after another; prompts may cost nothing."""

    def __init__(self, times: StepTimes, *, free_prompts: bool = False) -> None:
        self._times = times
        self._free_prompts = free_prompts

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        decodes_R = plan.samples & (plan.num_rows == plan.num_drafts + 1)
        chunk = NO_CHUNK if self._free_prompts else _chunk(plan, decodes_R)
        batch, rows = int(decodes_R.sum()), int(plan.num_rows[decodes_R].sum())
        context = float(plan.num_computed[decodes_R].mean()) if batch else 0.0
        times = self._times
        if times.overlaps:  # drafter and target run concurrently, so only the total is known
            return StepTimings(verify_s=times.round(batch, rows / max(batch, 1), context, chunk).total_s)
        written = rows + chunk.rows if plan.writes_context else 0
        return StepTimings(
            draft_s=self._draft_s(plan),
            verify_s=times.verify(batch, rows / max(batch, 1), context, chunk).total_s,
            inject_s=times.inject(written).total_s,
        )

    def _draft_s(self, plan: SchedulerOutput) -> float:
        drafted_R = plan.num_drafts > 0
        count, drafts = int(drafted_R.sum()), plan.num_draft_tokens
        if not count:
            return 0.0
        context = float(plan.num_computed[drafted_R].mean())
        return self._times.draft(count, 1 + drafts / count, context).total_s


def _chunk(plan: SchedulerOutput, decodes_R: BoolArray) -> Chunk:
    """Return the step's prompt rows as one chunk after their mean context."""
    if decodes_R.all():
        return NO_CHUNK
    mean = float(np.mean(plan.num_computed[~decodes_R]))
    return Chunk(int(plan.num_rows[~decodes_R].sum()), round(mean))
