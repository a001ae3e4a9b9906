"""Cumulative counts of a scheduler's steps for metrics. `cluster/engine/engine_core.py` takes snapshots.

Legend: R requests of a step.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..metrics.metric import STEP_TOKENS, Histogram
from ..request.request import FinishReason
from ..step.scheduler_output import BoolArray, DrafterUse, TreeOutcome
from ..step.step_outcome import CompletedStep, StepOutcome


class Counters:
    """Counts of everything so far.

    Args:
        num_speculative_tokens: length of the counts per draft position.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.steps = 0
        self.target_rows = 0  # over all passes, including those of requests that have left
        self.step_tokens = Histogram(STEP_TOKENS)
        self.preemptions = 0
        self.rejected: Counter[str] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        # Of requests that run for the first time in this engine; of those that began in another engine only
        # the prompt is counted.
        self.prompt_tokens = 0
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens
        self.generation_tokens = 0
        self.num_drafts = 0  # (request, step) pairs that verified drafts
        self.num_proposed_tokens = 0  # drafts that were made
        self.num_trimmed_tokens = 0  # drafts that were not verified
        self.num_draft_tokens = 0  # drafts that were verified
        self.num_accepted_tokens = 0
        self.num_copied_draft_tokens = 0  # of the verified drafts, those copied beside a drafter
        self.num_copied_accepted_tokens = 0
        self.skipped_passes = 0  # steps that left out the drafter's pass for copies
        self.num_branch_tokens = 0  # verified drafts off the main paths of trees
        self.num_accepted_branch_tokens = 0
        self.num_trees = 0  # (request, step) pairs that verified drafts with branches
        self.tree_depths = self.tree_widths = 0  # sums over them
        self.accepted_per_pos = np.zeros(num_speculative_tokens, dtype=np.int64)
        self.drafter_losses = 0  # drafters that failed or were replaced
        self.drafter_refilled_tokens = 0  # computed again for a new drafter's context
        self.drafter_rests = 0  # times that writing its context was stopped
        self.drafter_unwritten_tokens = 0  # tokens computed in the meantime
        self.drafter_use = DrafterUse()  # of a remote drafter
        self.experts_read = 0  # per routed layer
        self.routed_layers = 0  # passes through routed layers

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
