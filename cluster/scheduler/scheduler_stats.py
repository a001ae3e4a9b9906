"""Cumulative counts of a scheduler, for metrics. `cluster/engine/engine_core.py` takes snapshots."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..metrics.histogram import Histogram
from ..metrics.metric import STEP_TOKENS
from ..request.request import FinishReason
from ..step.scheduler_output import DrafterUse, ExpertReads, IntArray, SchedulerOutput, StepResult


class Counters:
    """Counts of everything so far.

    Args:
        num_speculative_tokens: length of the counts per draft position.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.steps = 0
        self.target_rows = 0  # over all passes
        self.step_tokens = Histogram(STEP_TOKENS)
        self.preemptions = 0
        self.rejected: Counter[str] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens
        self.num_drafts = 0  # (request, step) pairs that verified drafts
        self.num_proposed_tokens = 0  # drafts that were made
        self.num_trimmed_tokens = 0  # drafts that were not verified
        self.num_draft_tokens = 0  # drafts that were verified
        self.num_accepted_tokens = 0
        self.accepted_per_pos = np.zeros(num_speculative_tokens, dtype=np.int64)
        self.drafter_losses = 0  # drafters that failed or were replaced
        self.drafter_refilled_tokens = 0  # computed again for a new drafter's context
        self.drafter_rests = 0  # times that writing its context was stopped
        self.drafter_unwritten_tokens = 0  # tokens computed in the meantime
        self.drafter_use = DrafterUse()  # of a remote drafter
        self.experts_read = 0  # per routed layer
        self.routed_layers = 0  # passes through routed layers

    def count_first_entry(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that runs for the first time in this engine.

        Preemptions are not counted again; of a request that began in another engine only the prompt is
        counted.
        """
        self.prompt_tokens += num_prompt_tokens
        self.prefix_cache_queries += num_prompt_tokens
        self.prefix_cache_hits += num_cached_tokens

    def count_experts(self, reads: ExpertReads | None) -> None:
        if reads is not None:
            self.experts_read += reads.experts
            self.routed_layers += reads.layers

    def count_drafter(self, use: DrafterUse | None) -> None:
        if use is not None:
            self.drafter_use += use

    def count_rows(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Count the target's rows, including those of requests that have left, and drafts made."""
        proposed = plan.num_draft_tokens
        num_known = plan.num_batched_tokens - proposed
        num_accepted = int(result.num_tokens.sum()) - int(np.count_nonzero(plan.samples))
        self.step_tokens.observe(num_known + num_accepted)
        verified = proposed
        if proposed and result.num_drafts is not None:
            verified = int(result.num_drafts.sum())
        self.num_proposed_tokens += proposed
        self.num_trimmed_tokens += proposed - verified
        self.target_rows += num_known + verified

    def count_step(self, num_out_R: IntArray, num_drafts_R: IntArray, num_accepted_R: IntArray) -> None:
        """Count a committed step: new tokens, verified drafts, and accepted drafts among the tokens."""
        self.steps += 1
        self.generation_tokens += int(num_out_R.sum())
        if not num_drafts_R.any():
            return
        self.num_drafts += int(np.count_nonzero(num_drafts_R))
        self.num_draft_tokens += int(num_drafts_R.sum())
        self.num_accepted_tokens += int(num_accepted_R.sum())
        # Position i was accepted if more than i drafts were, so sum from the end.
        ends = np.bincount(num_accepted_R, minlength=len(self.accepted_per_pos) + 1)
        self.accepted_per_pos += np.cumsum(ends[::-1])[-2::-1]
