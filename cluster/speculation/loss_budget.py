"""Bounds the time that speculation may lose, and spaces attempts. Used by `draft_length_policy.py`."""

from __future__ import annotations

_INITIAL_STEPS = 4.0  # plain steps covered initially; 16 make the first 150 tokens 4 % slower on 60 cells
_REVIEW_LOSS_STEPS = 2.0  # plain steps whose time is lost from one early review to the next
MAX_BACKOFF = 16  # attempts that last a tenth of the first wait then cost less than a hundredth of the time


class LossBudget:
    """Bounds the time that speculation loses against plain decoding: a share of the time spent, in seconds.

    It pays for trials, each made only if its loss without any accepted draft is covered, and for drafts that
    were expected to pay and do not, until drafting pauses. The balance is at most some steps' seconds.
    """

    def __init__(self, share: float, max_steps: float) -> None:
        self._share, self._max_steps = share, max_steps
        self.balance_s = self._granted_s = self._lost_s = 0.0
        self._reviewed_s = 0.0  # lost when drafts were last reviewed, or less since

    def begin(self, plain_s: float) -> None:
        """Grant the initial balance for plain steps of `plain_s` seconds; more if these became longer."""
        more_s = max(_INITIAL_STEPS * plain_s - self._granted_s, 0.0)
        self._granted_s += more_s
        self.balance_s += more_s

    def earn(self, seconds: float, step_s: float) -> None:
        """Add the share of `seconds`; `step_s` are the last step's."""
        self.balance_s = min(self.balance_s + self._share * seconds, self._max_steps * step_s)

    def record_step(self, lost_s: float, plain_s: float) -> tuple[bool, bool]:
        """Account for a step with drafts that lost `lost_s`.

        Returns:
            Whether drafts must be reviewed, since their estimates may be out of date, and whether they must
            pause.
        """
        self._lost_s = max(self._lost_s + lost_s, 0.0)
        self._reviewed_s = min(self._reviewed_s, self._lost_s)
        must_review = self._lost_s > self._reviewed_s + _REVIEW_LOSS_STEPS * plain_s
        if must_review:
            self._reviewed_s = self._lost_s
        must_pause = self._lost_s > max(self.balance_s, self._max_steps * plain_s)
        if must_pause:
            self._lost_s = self._reviewed_s = self.balance_s = 0.0
        return must_review, must_pause


class Backoff:
    """The `steps` until the next attempt: doubled by each failure, up to `MAX_BACKOFF` times the first."""

    def __init__(self, steps: int) -> None:
        self.steps = self._first = steps

    def fail(self) -> None:
        self.steps = min(2 * self.steps, MAX_BACKOFF * self._first)

    def reset(self) -> None:
        self.steps = self._first
