"""A speculation policy that chooses draft lengths and trims at random."""

from __future__ import annotations

import numpy as np
from manta.cluster.speculation.draft_length_policy import DecodeBatch, DraftChoice, DraftLengthPolicy
from manta.cluster.speculation.step_cost_model import StepLoad
from manta.cluster.step.scheduler_output import FloatArray, SchedulerOutput, StepResult, Trim


class RandomPolicy(DraftLengthPolicy):
    """A policy with random decisions."""

    random = np.random.default_rng(0)

    def choose(self, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        random = self.random
        maximum = int(random.integers(0, self._max_drafts + 1)) if random.random() < 0.8 else 0
        drafts_R = random.integers(0, np.minimum(batch.limits_R, maximum), endpoint=True).astype(np.int32)
        return DraftChoice(drafts_R, maximum, is_tree=random.random() < 0.7)

    def trim(
        self, choice: DraftChoice, plan: SchedulerOutput, load: StepLoad, weights_R: FloatArray
    ) -> Trim | None:
        random, num_requests = self.random, plan.num_requests
        if not plan.num_drafts.any() or random.random() < 0.2:
            return None
        num_tokens = plan.num_batched_tokens
        seconds_N = np.sort(random.uniform(0.1, 3, num_tokens + 1))
        num_rows = None
        if self._costs.has_fixed_sizes:
            num_rows = int(random.integers(num_tokens - plan.num_draft_tokens, num_tokens, endpoint=True))
        return Trim(
            bias_K=random.normal(0, 3, self._max_drafts).astype(np.float32),
            slope_K=random.normal(0, 3, self._max_drafts).astype(np.float32),
            bias_R=random.normal(0, 3, num_requests).astype(np.float32),
            weights_R=(random.uniform(0, 9, num_requests) * plan.samples).astype(np.float32),
            seconds_N=seconds_N.astype(np.float32),
            num_rows=num_rows,
            rate=float(random.uniform(0, 9)),
        )

    def observe_shaped(self, choice: DraftChoice, load: StepLoad, result: StepResult) -> None:
        """Learn nothing: a random choice has no estimate to compare a tree with."""
