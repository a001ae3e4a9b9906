"""Cumulative counts of a scheduler's steps: `Counters` for metrics, `UsageMeter` for usage by account.

`cluster/engine/engine_core.py` takes snapshots; `UsageMeter.totals` may be called from any thread. Both get
every completed step once (`observe`), the meter from the first account on.

Usage: a step's seconds are split among its requests by rows, of prompts, anchors or drafts. Seconds of plain
decoding are *measured*, never estimated (docs/decisions/receipts.md). A step in which all requests decode is
compared if a plain step with about as many requests ran in this engine, with the age of that measurement; or
if an earlier start measured step times, which is counted separately. Other steps count as not measured.
Nothing is counted before a request names an account; from then on requests without one are counted for the
empty account.

Legend: R requests of a step, A accounts, C columns of `Usage`, S slots.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..metrics.metric import STEP_TOKENS, Histogram, UsageAccount
from ..request.request import FinishReason
from ..speculation.step_cost_model import load_class
from ..step.scheduler_output import BoolArray, DrafterUse, SchedulerOutput, TreeOutcome
from ..step.step_outcome import CompletedStep, StepOutcome

_MAX_LOAD_DIFFERENCE = 1  # difference of loads (of `load_class`) up to which a plain step is comparable
_INITIAL_ACCOUNTS = 16  # initial capacity of accounts; doubled when full


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


class Usage(NamedTuple):
    """Usage of one account so far, in seconds of the engine (not multiplied by its devices).

    Attributes:
        tokens: generated tokens.
        steps: (request, step) pairs with tokens; plain decoding needs one per token.
        engine_s: seconds of all steps.
        compared_s: seconds of the steps that are compared with plain decoding.
        plain_s: measured time of plain decoding for the tokens of these.
        aged_s: in seconds squared: sum of `compared_s` times the age of the plain measurement.
        kept_s: part of `compared_s` that is compared with plain steps of unknown age, from before the first
            account was named (mostly of an earlier start).
    """

    tokens: float = 0.0
    steps: float = 0.0
    engine_s: float = 0.0
    compared_s: float = 0.0
    plain_s: float = 0.0
    aged_s: float = 0.0
    kept_s: float = 0.0


class UsageMeter:
    """Counts the usage of one scheduler's steps by account.

    Args:
        num_slots: maximum number of requests running at once.

    Attributes:
        has_accounts: whether a request has named an account; steps before are not reported to the meter.
    """

    def __init__(self, num_slots: int) -> None:
        self.has_accounts = False
        self._indices: dict[UsageAccount, int] = {UsageAccount(): 0}
        self._account_S = np.zeros(num_slots, np.intp)
        self._sums_AC = np.zeros((_INITIAL_ACCOUNTS, len(Usage._fields)))
        self._in_flight: dict[int, NDArray[np.intp]] = {}  # accounts of plans in flight, by step
        self._ended_s = 0.0  # end of the last step
        self._plain_at_s: dict[int, float] = {}  # end of the last plain step, by load
        self._has_saved_plain = False  # whether plain steps were measured before any ran here

    def admit(self, slot: int, account: UsageAccount | None) -> None:
        """Record the account of a new request in a slot."""
        self.has_accounts = self.has_accounts or account is not None
        if self.has_accounts:
            index = self._indices.setdefault(account or UsageAccount(), len(self._indices))
            if index == len(self._sums_AC):
                self._sums_AC = np.concatenate([self._sums_AC, np.zeros_like(self._sums_AC)])
            self._account_S[slot] = index

    def on_scheduled(self, plan: SchedulerOutput) -> None:
        """Record a plan's accounts; a request that leaves while it is in flight is still charged."""
        self._in_flight[plan.step] = self._account_S[plan.slots]

    def observe(self, step: CompletedStep) -> None:
        """Count a completed step."""
        plan, outcome, result, now_s = step.plan, step.outcome, step.result, step.ended_s
        elapsed_s = now_s - max(step.planned_s, self._ended_s)
        self._ended_s = now_s
        decodes = not step.prompt_rows and bool(len(outcome.slots))
        load, plain_s = load_class(plan.num_requests), step.plain_s
        if not self._plain_at_s and plain_s > 0.0:
            self._has_saved_plain = True  # known before any plain step ran here
        if decodes and not plan.num_draft_tokens:
            self._plain_at_s[load] = now_s
        accounts_R = self._in_flight.pop(plan.step, None)
        if accounts_R is None:
            return  # planned before the first account was named
        spent_RC = np.zeros((len(accounts_R), len(Usage._fields)))
        tokens_R, steps_R, engine_R, compared_R, plain_R, aged_R, kept_R = spent_RC.T
        tokens_R[step.remaining_R] = outcome.num_out
        steps_R[:] = tokens_R > 0
        verified_R = plan.num_drafts if result.num_drafts is None else result.num_drafts
        rows_R = plan.num_rows - plan.num_drafts + verified_R
        engine_R[:] = rows_R * (elapsed_s / int(rows_R.sum()))
        age_s = self._age_s(load, now_s)
        if decodes and plain_s > 0.0 and (age_s is not None or self._has_saved_plain):
            compared_R[:] = engine_R
            # Plain decoding would have taken, on average, as many steps as each request has tokens.
            plain_R[:] = tokens_R * (plain_s / len(outcome.slots))
            if age_s is None:
                kept_R[:] = engine_R
            else:
                aged_R[:] = engine_R * age_s
        np.add.at(self._sums_AC, accounts_R, spent_RC)

    def _age_s(self, load: int, now_s: float) -> float | None:
        """Return how long ago a plain step with a comparable load ran here; None if none did."""
        comparable = [
            at_s for other, at_s in self._plain_at_s.items() if abs(other - load) <= _MAX_LOAD_DIFFERENCE
        ]
        return now_s - max(comparable) if comparable else None

    def totals(self) -> dict[UsageAccount, Usage]:
        """Return the usage of each account, which only grows. Callable from any thread."""
        indices, sums_AC = self._indices.copy(), self._sums_AC.copy()
        return {
            account: Usage(*sums_AC[index].tolist())
            for account, index in indices.items()
            if index < len(sums_AC) and sums_AC[index].any()
        }
