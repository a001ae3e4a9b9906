"""Cumulative counts of a scheduler's steps for metrics. `cluster/engine/engine_stats.py` has their snapshots.

Legend: R requests of a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..metrics.metric import STEP_TOKENS, Histogram
from ..request.request import FinishReason
from ..step.scheduler_output import BoolArray, DrafterUse, TreeOutcome
from ..step.step_outcome import CompletedStep, StepOutcome


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Cumulative counts. `cluster/metrics/engine_metrics.py` names the metrics that show them."""

    steps: int = 0
    target_rows: int = 0  # over all passes, including prompts and requests that have left
    preemptions: int = 0
    # Of requests that run for the first time in this engine; of those that began in another engine only the
    # prompt is counted.
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    # Tokens of prompts that a tier below the cache was asked for, and those of the hits that it had.
    tier_queries: int = 0
    tier_hits: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0  # (request, step) pairs that verified drafts
    num_proposed_tokens: int = 0  # drafts that were made
    num_trimmed_tokens: int = 0  # drafts that were dropped for their margins before verification
    num_draft_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0
    # Those of the verified and accepted drafts that were copied beside a drafter (`suffix_drafts`); of draft
    # trees, all if the main path is a copy.
    num_copied_draft_tokens: int = 0
    num_copied_accepted_tokens: int = 0
    skipped_passes: int = 0  # steps that left out the drafter's pass, as all drafts were copies
    num_branch_tokens: int = 0  # verified drafts off the main paths of trees
    num_accepted_branch_tokens: int = 0
    num_trees: int = 0  # (request, step) pairs that verified drafts with branches
    tree_depths: int = 0  # sum over them of the longest path
    tree_widths: int = 0  # and of the most drafts of one position
    drafter_losses: int = 0  # times that a drafter failed or was replaced
    drafter_refilled_tokens: int = 0  # computed again to give a drafter its context
    drafter_rests: int = 0  # times that writing the drafter's context was stopped
    drafter_unwritten_tokens: int = 0  # computed in the meantime
    drafter_use: DrafterUse = field(default_factory=DrafterUse)  # of a remote drafter
    # Over routed layers. Divided by `routed_layers`: the experts that a layer reads in a step.
    experts_read: int = 0
    routed_layers: int = 0  # passes through routed layers


class Counters(StepCounts):
    """Counts of everything so far.

    Args:
        num_speculative_tokens: length of the counts per draft position.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__()
        self.step_tokens = Histogram(STEP_TOKENS)
        self.rejected: Counter[str] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        self.accepted_per_pos = np.zeros(num_speculative_tokens, dtype=np.int64)

    def snapshot(self) -> dict[str, Any]:  # Any: the fields of StepCounts
        return {each.name: getattr(self, each.name) for each in fields(StepCounts)}

    def observe(self, step: CompletedStep) -> None:
        """Count a completed step."""
        plan, outcome, result = step.plan, step.outcome, step.result
        proposed = plan.num_draft_tokens
        num_known = plan.num_batched_tokens - proposed
        num_accepted = int(result.num_tokens.sum()) - int(np.count_nonzero(plan.samples))
        self.steps += 1
        self.step_tokens.observe(num_known + num_accepted)
        self.generation_tokens += int(outcome.num_out.sum())
        if result.expert_reads is not None:
            self.experts_read += result.expert_reads.experts
            self.routed_layers += result.expert_reads.layers
        if result.drafter_use is not None:
            self.drafter_use += result.drafter_use
        self.target_rows += num_known
        if not proposed:
            return
        verified = proposed if result.num_drafts is None else int(result.num_drafts.sum())
        self.num_proposed_tokens += proposed
        self.num_trimmed_tokens += proposed - verified
        self.skipped_passes += result.is_pass_skipped
        self.target_rows += verified
        if outcome.num_drafts.any():
            self.num_drafts += int(np.count_nonzero(outcome.num_drafts))
            self.num_draft_tokens += int(outcome.num_drafts.sum())
            self.num_accepted_tokens += int(outcome.num_accepted.sum())
            if result.is_copied is not None:
                self._count_copies(outcome, result.is_copied[step.remaining_R])
            if result.trees is not None:
                self._count_trees(outcome, result.trees, step.remaining_R)
            # Position i was accepted if more than i drafts were, so sum from the end.
            ends = np.bincount(outcome.num_accepted, minlength=len(self.accepted_per_pos) + 1)
            self.accepted_per_pos += np.cumsum(ends[::-1])[-2::-1]

    def _count_copies(self, outcome: StepOutcome, is_copied_R: BoolArray) -> None:
        self.num_copied_draft_tokens += int(outcome.num_drafts[is_copied_R].sum())
        self.num_copied_accepted_tokens += int(outcome.num_accepted[is_copied_R].sum())

    def _count_trees(self, outcome: StepOutcome, trees: TreeOutcome, remaining_R: BoolArray) -> None:
        main = trees.num_main_drafts_R, trees.num_main_accepted_R
        drafts_R, accepted_R = (values_R[remaining_R] for values_R in main)
        self.num_branch_tokens += int((outcome.num_drafts - drafts_R).sum())
        branched_R = outcome.num_accepted - np.minimum(accepted_R, outcome.num_accepted)
        self.num_accepted_branch_tokens += int(branched_R.sum())
        self.num_trees += int(np.count_nonzero(trees.depths_R[remaining_R]))
        self.tree_depths += int(trees.depths_R[remaining_R].sum())
        self.tree_widths += int(trees.widths_R[remaining_R].sum())
