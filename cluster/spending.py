"""For whom an engine's steps were, by account: tokens, steps, time, and the time of plain decoding.

A step's seconds are shared among its requests by their rows: what is computed for a prompt, an anchor or a
draft is a row. Seconds of plain decoding are *measured*, never guessed (docs/decisions/receipts.md): a step
in which all decode is compared where a plain step of about as many requests ran in this engine, and it is
told how long ago; or where an earlier start measured what steps take, which is told apart. What is not
compared counts as not measured. Nothing is counted before a request names an account; from then on those
that name none are nobody's. Told by `scheduler.py`; read from any thread (`totals`).

Legend: R requests of a step, A accounts, C columns of `Spent`, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .label_values import Account
from .outcome import StepOutcome
from .plan import IntArray, SchedulerOutput, StepResult
from .speculation.draft_lengths import load_class
from .step_controller import ScheduledStep

_LIKE = 1  # loads (of `load_class`) apart, and plain steps of one are measured for the other
_FIRST = 16  # accounts that there is room for; twice as many when that is too few


class Spent(NamedTuple):
    """On one account, so far; seconds of the engine, whatever number of devices it has.

    Attributes:
        tokens: that came out.
        steps: request x step in which any did: plain decoding takes one for each token.
        engine_s: of all steps.
        compared_s: of those that are compared with plain decoding.
        plain_s: what plain decoding would have taken for the tokens of these, as it was measured.
        aged_s: seconds x seconds: sum of `compared_s` times how long before plain decoding was measured.
        kept_s: of `compared_s`, compared with what was measured before anybody asked for receipts, mostly by
            an earlier start; without an age.
    """

    tokens: float = 0.0
    steps: float = 0.0
    engine_s: float = 0.0
    compared_s: float = 0.0
    plain_s: float = 0.0
    aged_s: float = 0.0
    kept_s: float = 0.0


class Spending:
    """Of one scheduler.

    Args:
        num_slots: most requests that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._indices: dict[Account, int] = {Account(): 0}
        self._of_S = np.zeros(num_slots, np.intp)
        self._sums_AC = np.zeros((_FIRST, len(Spent._fields)))
        self._begun = False
        self._departed: dict[int, NDArray[np.intp]] = {}  # accounts of plans in flight, by step
        self._ended_s = 0.0  # the last step
        self._plain_at_s: dict[int, float] = {}  # by load, when a plain step of it ended
        self._any_kept = False  # whether plain steps were measured before any ran here

    def enter(self, slots: IntArray, accounts: Sequence[Account | None]) -> None:
        """These slots have new requests."""
        self._begun = self._begun or any(account is not None for account in accounts)
        if self._begun:
            for slot, account in zip(slots.tolist(), accounts, strict=True):
                self._of_S[slot] = self._index(account or Account())

    def _index(self, account: Account) -> int:
        index = self._indices.setdefault(account, len(self._indices))
        if index == len(self._sums_AC):
            self._sums_AC = np.concatenate([self._sums_AC, np.zeros_like(self._sums_AC)])
        return index

    def depart(self, plan: SchedulerOutput) -> None:
        """A plan was made: whoever leaves while it is in flight pays for it all the same."""
        if self._begun:
            self._departed[plan.step] = self._of_S[plan.slots]

    def learn(self, step: ScheduledStep, outcome: StepOutcome, result: StepResult, now_s: float) -> None:
        """A step has ended.

        Args:
            now_s: on the clock of `ScheduledStep.planned_s`.
        """
        if not self._begun:
            return
        plan, elapsed_s = step.plan, now_s - max(step.planned_s, self._ended_s)
        self._ended_s = now_s
        decodes = not step.load.prompt_rows and bool(len(outcome.slots))
        load, plain_s = load_class(plan.num_requests), step.choice.plain_s
        if not self._plain_at_s and plain_s > 0.0:
            self._any_kept = True  # known before any plain step ran here
        if decodes and not plan.num_draft_tokens:
            self._plain_at_s[load] = now_s
        accounts_R = self._departed.pop(plan.step, None)
        if accounts_R is None:
            return  # planned before anybody asked
        spent_RC = np.zeros((len(accounts_R), len(Spent._fields)))
        tokens_R, steps_R, engine_R, compared_R, plain_R, aged_R, kept_R = spent_RC.T
        tokens_R[step.staying_R] = outcome.num_out
        steps_R[:] = tokens_R > 0
        verified_R = plan.num_drafts if result.num_drafts is None else result.num_drafts
        rows_R = plan.num_rows - plan.num_drafts + verified_R
        engine_R[:] = rows_R * (elapsed_s / int(rows_R.sum()))
        age_s = self._age_s(load, now_s)
        if decodes and plain_s > 0.0 and (age_s is not None or self._any_kept):
            compared_R[:] = engine_R
            # Plainly all would have taken as many steps as each has tokens, on average.
            plain_R[:] = tokens_R * (plain_s / len(outcome.slots))
            if age_s is None:
                kept_R[:] = engine_R
            else:
                aged_R[:] = engine_R * age_s
        np.add.at(self._sums_AC, accounts_R, spent_RC)

    def _age_s(self, load: int, now_s: float) -> float | None:
        """How long ago a plain step of such a load ran here."""
        like = [at_s for other, at_s in self._plain_at_s.items() if abs(other - load) <= _LIKE]
        return now_s - max(like) if like else None

    def totals(self) -> dict[Account, Spent]:
        """Of each account; only ever grows. From any thread."""
        indices, sums_AC = self._indices.copy(), self._sums_AC.copy()
        return {
            account: Spent(*sums_AC[index].tolist())
            for account, index in indices.items()
            if index < len(sums_AC) and sums_AC[index].any()
        }
