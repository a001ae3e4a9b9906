"""Usage of an engine's steps by account: tokens, steps, time, and the time of plain decoding.

A step's seconds are split among its requests by rows, of prompts, anchors or drafts. Seconds of plain
decoding are *measured*, never estimated (docs/decisions/receipts.md). A step in which all requests decode is
compared if a plain step with about as many requests ran in this engine, with the age of that measurement; or
if an earlier start measured step times, which is counted separately. Other steps count as not measured.

Nothing is counted before a request names an account; from then on requests without one are counted for the
empty account. Called by `scheduler.py`; `totals` may be called from any thread.

Legend: R requests of a step, A accounts, C columns of `Usage`, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..metrics.bounded_labels import UsageAccount
from ..speculation.draft_lengths import load_class
from ..step.scheduler_output import IntArray, SchedulerOutput, StepResult
from ..step.step_outcome import StepOutcome
from .step_controller import ScheduledStep

_MAX_LOAD_DIFFERENCE = 1  # difference of loads (of `load_class`) up to which a plain step is comparable
_INITIAL_ACCOUNTS = 16  # initial capacity of accounts; doubled when full


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
    """

    def __init__(self, num_slots: int) -> None:
        self._indices: dict[UsageAccount, int] = {UsageAccount(): 0}
        # Account index by slot.
        self._account_S = np.zeros(num_slots, np.intp)
        self._sums_AC = np.zeros((_INITIAL_ACCOUNTS, len(Usage._fields)))
        self._has_accounts = False
        self._in_flight: dict[int, NDArray[np.intp]] = {}  # accounts of plans in flight, by step
        self._ended_s = 0.0  # end of the last step
        self._plain_at_s: dict[int, float] = {}  # end of the last plain step, by load
        self._has_saved_plain = False  # whether plain steps were measured before any ran here

    def enter(self, slots: IntArray, accounts: Sequence[UsageAccount | None]) -> None:
        """Record the accounts of new requests in these slots."""
        self._has_accounts = self._has_accounts or any(account is not None for account in accounts)
        if self._has_accounts:
            for slot, account in zip(slots.tolist(), accounts, strict=True):
                self._account_S[slot] = self._index(account or UsageAccount())

    def _index(self, account: UsageAccount) -> int:
        index = self._indices.setdefault(account, len(self._indices))
        if index == len(self._sums_AC):
            self._sums_AC = np.concatenate([self._sums_AC, np.zeros_like(self._sums_AC)])
        return index

    def depart(self, plan: SchedulerOutput) -> None:
        """Record a plan's accounts; a request that leaves while it is in flight is still charged."""
        if self._has_accounts:
            self._in_flight[plan.step] = self._account_S[plan.slots]

    def learn(self, step: ScheduledStep, outcome: StepOutcome, result: StepResult, now_s: float) -> None:
        """Count a completed step.

        Args:
            now_s: time on the clock of `ScheduledStep.planned_s`.
        """
        if not self._has_accounts:
            return
        plan, elapsed_s = step.plan, now_s - max(step.planned_s, self._ended_s)
        self._ended_s = now_s
        decodes = not step.load.prompt_rows and bool(len(outcome.slots))
        load, plain_s = load_class(plan.num_requests), step.choice.plain_s
        if not self._plain_at_s and plain_s > 0.0:
            self._has_saved_plain = True  # known before any plain step ran here
        if decodes and not plan.num_draft_tokens:
            self._plain_at_s[load] = now_s
        accounts_R = self._in_flight.pop(plan.step, None)
        if accounts_R is None:
            return  # planned before the first account was named
        spent_RC = np.zeros((len(accounts_R), len(Usage._fields)))
        tokens_R, steps_R, engine_R, compared_R, plain_R, aged_R, kept_R = spent_RC.T
        tokens_R[step.staying_R] = outcome.num_out
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
