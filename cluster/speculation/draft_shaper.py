"""Makes trees of the drafts that a step was to have, and interprets what came of them.

The scheduler's `StepController` composes it with draft lengths (`draft_length_policy.py`), which decide per
class of load whether drafts branch (`tree_policy.py`). Where an engine's drafts form chains it is not used.

Legend: R requests of a step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..step.draft_shape import DraftShape
from ..step.scheduler_output import BoolArray, FloatArray, IntArray, SchedulerOutput, StepResult, Trim
from .acceptance_model import AcceptanceModel
from .draft_length_policy import DraftChoice
from .tree_policy import BranchModel


class DraftShaper:
    """Of one engine, whose requests' drafts have at most this shape and `longest` drafts on a path."""

    def __init__(self, shape: DraftShape, longest: int) -> None:
        self._size, self._longest = shape.most_drafts(longest), longest
        self._branches = BranchModel(shape.width)

    def reset(self) -> None:
        """Forget everything, because the drafter was replaced."""
        self._branches.reset()

    def shape(self, choice: DraftChoice, limits_R: IntArray) -> DraftChoice:
        """Return the choice with trees, as full as its chains would be; trials keep chains.

        Args:
            limits_R: most drafts of each request.
        """
        if choice.is_trial or not choice.length or not choice.is_tree:
            return choice
        nodes_R = -(-choice.num_drafts_R * max(self._size, self._longest) // self._longest)
        shape = self._branches.shape(choice.length)
        return choice._replace(num_drafts_R=np.minimum(limits_R, nodes_R), shape=shape)

    def plan(
        self, plan: SchedulerOutput, choice: DraftChoice, predictor: AcceptanceModel, weights_R: FloatArray
    ) -> SchedulerOutput:
        """Return the plan with the shape of a choice; all drafts are verified unless a policy trims them."""
        curves = predictor.bias_K, predictor.slope_K, predictor.offsets(plan.slots)
        every = Trim(*curves, weights_R, np.zeros(0, np.float32), num_rows=plan.num_batched_tokens)
        return replace(plan, tree=choice.shape, trim=every)

    def observe(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Learn from a completed step with a shape."""
        if plan.tree is not None and result.trees is not None:
            self._branches.observe(plan.tree, result.trees)

    def grow_s(self, result: StepResult) -> float:
        """Return the host's seconds of growing a step's trees; 0 if it grew none."""
        return 0.0 if result.tree_gain is None else result.tree_gain.grow_s

    def main_path(
        self, result: StepResult, remaining_R: BoolArray, num_drafts_R: IntArray, num_accepted_R: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the verified and accepted drafts that chains would have had, int32 [R] each.

        Args:
            remaining_R: requests of the plan that have not left; the rest is of these.
            num_drafts_R, num_accepted_R: those of the drafts as they were.
        """
        if (trees := result.trees) is None:
            return num_drafts_R, num_accepted_R
        accepted_R = np.minimum(num_accepted_R, trees.num_main_accepted_R[remaining_R])
        return trees.num_main_drafts_R[remaining_R], accepted_R
