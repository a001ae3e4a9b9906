"""Bounds the time that speculation may lose, and spaces attempts. Used by `draft_length_policy.py`."""

from __future__ import annotations

from .acceptance_model import NUM_BLOCKS

_SHARE = 0.01  # of the total time; the loss that docs/decisions/draft-length.md promises
_MAX_STEPS = 16.0  # plain steps whose time is covered at most
_INITIAL_STEPS = 4.0  # plain steps covered initially; 16 make the first 150 tokens 4 % slower on 60 cells
# Plain steps whose time is lost from one early review to the next; without these reviews the worst of 60
# cells is at 0.921 of the best instead of 0.944.
_REVIEW_LOSS_STEPS = 2.0
RETRY_STEPS = NUM_BLOCKS  # until what did not pay is tried again: all samples are new
MAX_BACKOFF = 16  # attempts that last a tenth of the first wait then cost less than a hundredth of the time


class LossBudget:
    """Bounds the time that speculation loses against plain decoding: a share of the time spent, in seconds.

    It pays for trials, each made only if its loss without any accepted draft is covered, and for drafts that
    were expected to pay and do not, until drafting pauses. The balance is at most some steps' seconds.
    """

    def __init__(self) -> None:
        self.balance_s = self._granted_s = self._lost_s = 0.0
        self._reviewed_s = 0.0  # lost when drafts were last reviewed, or less since

    def begin(self, plain_s: float) -> None:
        """Grant the initial balance for plain steps of `plain_s` seconds; more if these became longer."""
        more_s = max(_INITIAL_STEPS * plain_s - self._granted_s, 0.0)
        self._granted_s += more_s
        self.balance_s += more_s

    def earn(self, seconds: float, step_s: float) -> None:
        """Add the share of `seconds`; `step_s` are the last step's."""
        self.balance_s = min(self.balance_s + _SHARE * seconds, _MAX_STEPS * step_s)

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
        must_pause = self._lost_s > max(self.balance_s, _MAX_STEPS * plain_s)
        if must_pause:
            self._lost_s = self._reviewed_s = self.balance_s = 0.0
        return must_review, must_pause


class Backoff:
    """The `steps` until the next attempt: doubled by each failure, up to `MAX_BACKOFF` times the first."""

    def __init__(self, steps: int = RETRY_STEPS) -> None:
        self.steps = self._first = steps

    def fail(self) -> None:
        self.steps = min(2 * self.steps, MAX_BACKOFF * self._first)

    def reset(self) -> None:
        self.steps = self._first
