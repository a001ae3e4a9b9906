"""Cumulative figures of a scheduler, for metrics. Only ever grow; `engine.py` snapshots them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .histogram import Histogram
from .metric import STEP_TOKENS
from .plan import DrafterUse, ExpertReads, IntArray, SchedulerOutput, StepResult
from .request import FinishReason


class Counters:
    """What happened so far.

    Args:
        num_speculative_tokens: length of the count per draft position.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.steps = 0
        self.target_rows = 0  # of all passes
        self.step_tokens = Histogram(STEP_TOKENS)
        self.preemptions = 0
        self.rejected: Counter[str] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens
        self.num_drafts = 0  # requests x steps that verified drafts
        self.num_proposed_tokens = 0  # drafts that were made
        self.num_trimmed_tokens = 0  # that were not verified
        self.num_draft_tokens = 0  # that were verified
        self.num_accepted_tokens = 0
        self.accepted_per_pos = np.zeros(num_speculative_tokens, dtype=np.int64)
        self.drafter_losses = 0  # drafters that failed or were replaced
        self.drafter_refilled_tokens = 0  # computed anew for the next one's context
        self.drafter_rests = 0  # times that its context was not written any more
        self.drafter_unwritten_tokens = 0  # computed meanwhile
        self.drafter_use = DrafterUse()  # of one in a process of its own
        self.experts_read = 0  # by routed layers, each for itself
        self.routed_layers = 0  # that were run

    def count_first_entry(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request runs for the first time here (what a preemption repeats does not count again, and of a
        request that began elsewhere only the prompt counts)."""
        self.prompt_tokens += num_prompt_tokens
        self.prefix_cache_queries += num_prompt_tokens
        self.prefix_cache_hits += num_cached_tokens

    def count_experts(self, reads: ExpertReads | None) -> None:
        """What a step read of them."""
        if reads is not None:
            self.experts_read += reads.experts
            self.routed_layers += reads.layers

    def count_drafter(self, use: DrafterUse | None) -> None:
        """What has been heard of a drafter in a process of its own."""
        if use is not None:
            self.drafter_use += use

    def count_rows(self, plan: SchedulerOutput, result: StepResult) -> None:
        """What the target computed, whoever has left since, and which drafts were made for it."""
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
        """A step is committed: tokens that came out, drafts verified, accepted drafts among the tokens."""
        self.steps += 1
        self.generation_tokens += int(num_out_R.sum())
        if not num_drafts_R.any():
            return
        self.num_drafts += int(np.count_nonzero(num_drafts_R))
        self.num_draft_tokens += int(num_drafts_R.sum())
        self.num_accepted_tokens += int(num_accepted_R.sum())
        # Position i was accepted where more than i drafts were: count from above.
        ends = np.bincount(num_accepted_R, minlength=len(self.accepted_per_pos) + 1)
        self.accepted_per_pos += np.cumsum(ends[::-1])[-2::-1]
