"""What a planned step takes on a machine that was measured: a table of its steps, and lines between them.

Filled by `jobs/simulate/measure.py` from a real engine's steps; used as a `SimulatedExecutor`'s cost where
the simulation itself is held against that engine (`jobs/simulate/validate.py`).

Legend: B numbers of decoding requests, D numbers of drafts of each, C tokens of context, P rows of prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan import SchedulerOutput, StepTimings

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of steps; each axis ascends and has at least one point. Beyond its ends the ends count.

    Attributes:
        draft_BDC: of the drafting.
        rest_BDC: of all else that a step's timings tell.
        prompt_P: of a step that computes so many rows of one prompt and nothing else.
        host_s: of a step, beside its timings: planning, committing, handing over.
    """

    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_BDC: Floats
    rest_BDC: Floats
    prompt_rows: tuple[int, ...]
    prompt_P: Floats
    host_s: float = 0.0

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        """Requests of a kind by their means."""
        decodes_R = plan.samples & (plan.num_rows == plan.num_drafts + 1)
        batch, num_drafts = int(decodes_R.sum()), plan.num_draft_tokens
        context = float(np.maximum(plan.num_computed[decodes_R], 0).mean()) if batch else 0.0
        drafted = int(np.count_nonzero(plan.num_drafts))
        draft_s = 0.0 if not drafted else self._at(self.draft_BDC, drafted, num_drafts / drafted, context)
        rest_s = 0.0 if not batch else self._at(self.rest_BDC, batch, num_drafts / batch, context)
        rows = int(plan.num_rows[~decodes_R].sum())
        if rows:
            prompt_s = float(np.interp(rows, self.prompt_rows, self.prompt_P))
            rest_s = max(prompt_s, rest_s + prompt_s - float(self.prompt_P[0]))
        return StepTimings(draft_s=draft_s, verify_s=rest_s)

    def _at(self, values_BDC: Floats, batch: float, drafts: float, context: float) -> float:
        for axis, at in ((self.batches, batch), (self.drafts, drafts), (self.contexts, context)):
            values_BDC = _between(values_BDC, axis, at)
        return float(values_BDC)


def _between(values: Floats, axis: Sequence[int], at: float) -> Floats:
    """The values at that place of their first axis."""
    high = min(max(bisect_right(axis, at), 1), len(axis) - 1)
    if len(axis) == 1:
        return values[0]
    low = high - 1
    share = min(max((at - axis[low]) / (axis[high] - axis[low]), 0.0), 1.0)
    return (1.0 - share) * values[low] + share * values[high]
