"""A bound on time that is lost: a share of the time spent, saved up to some steps.

Speculation may lose about one percent against plain decoding (`draft_length_policy.py`): in trials, each
made only if its loss without any accepted draft is covered, and with drafts that were expected to pay and do
not, until drafting pauses.
"""

from __future__ import annotations

_INITIAL_STEPS = 4.0  # plain steps covered initially; 16 make the first 150 tokens 4 % slower on 60 cells
MAX_BACKOFF = 16  # attempts that last a tenth of the first wait then cost less than a hundredth of the time


class LossBudget:
    """One balance of an engine, in seconds: a share of the time, up to some steps' seconds."""

    def __init__(self, share: float, max_steps: float) -> None:
        self._share, self._max_steps = share, max_steps
        self.balance_s = self._granted_s = self._lost_s = 0.0

    def begin(self, plain_s: float) -> None:
        """Grant the initial balance for plain steps of `plain_s` seconds; more if these became longer."""
        more_s = max(_INITIAL_STEPS * plain_s - self._granted_s, 0.0)
        self._granted_s += more_s
        self.balance_s += more_s

    def earn(self, seconds: float, step_s: float) -> None:
        """Add the share of `seconds`; `step_s` are the last step's."""
        self.balance_s = min(self.balance_s + self._share * seconds, self._max_steps * step_s)

    def record_step(self, lost_s: float, plain_s: float) -> bool:
        """Account for a step with drafts that lost `lost_s`; return whether drafting must pause."""
        self._lost_s = max(self._lost_s + lost_s, 0.0)
        if self._lost_s <= max(self.balance_s, self._max_steps * plain_s):
            return False
        self._lost_s = self.balance_s = 0.0
        return True


class Backoff:
    """The `steps` until the next attempt: doubled after each failure, up to `MAX_BACKOFF` times the first."""

    def __init__(self, steps: int) -> None:
        self.steps = self._first = steps

    def fail(self) -> None:
        self.steps = min(2 * self.steps, MAX_BACKOFF * self._first)

    def reset(self) -> None:
        self.steps = self._first
