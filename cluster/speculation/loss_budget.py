"""Bounds what speculation may lose against plain decoding: about one percent of the time.

Two things can be slower than plain decoding, and one account covers both:

* a *trial*, made to measure a draft length. It is made only if its worst case is covered, and its loss
  against the best known length is deducted;
* drafts that were expected to pay and do not. Their losses and gains are added up. Once the net loss exceeds
  what is covered, drafting pauses whatever is predicted, because measurements take precedence.

Pure; used by `draft_length_policy.py`.
"""

from __future__ import annotations

_SHARE = 0.01  # of the total time
_INITIAL_STEPS, _MAX_STEPS = 4.0, 16.0  # plain steps covered initially, and at most
_CHANCE_STEPS = 8.0  # net loss in plain steps that may be due to chance and is no reason to pause
_OUTLIER = 2.0  # multiple of the predicted seconds; longer steps are not caused by drafts


class LossBudget:
    """The loss account of one engine. Nothing is covered before `begin`."""

    def __init__(self) -> None:
        self._balance_s = self._granted_s = self._lost_s = 0.0
        self._has_begun = False

    def begin(self, plain_s: float) -> None:
        """Grant the initial balance for plain steps of `plain_s` seconds; more if these became longer."""
        more_s = max(_INITIAL_STEPS * plain_s - self._granted_s, 0.0)
        self._granted_s += more_s
        self._balance_s += more_s
        self._has_begun = True

    def earn(self, seconds: float, step_s: float) -> None:
        """Add a share of `seconds` to the balance, which the last step's seconds, `step_s`, limit."""
        if self._has_begun:
            self._balance_s = min(self._balance_s + _SHARE * seconds, _MAX_STEPS * step_s)

    def num_covered(self, loss_s: float, most: int) -> int:
        """Return for how many steps, up to `most`, a loss of `loss_s` each is covered."""
        return most if loss_s * most <= self._balance_s else int(self._balance_s / loss_s)

    def pay(self, loss_s: float) -> None:
        """Deduct one trial step's loss, at most half of the balance so that an outlier ends no trials."""
        self._balance_s -= min(loss_s, self._balance_s / 2)

    def settle(self, seconds: float, predicted_s: float, plain_s: float, worth_s: float) -> bool:
        """Account for a step with drafts; return whether drafting must pause.

        Args:
            predicted_s: seconds that were predicted for it.
            plain_s: seconds of a plain step.
            worth_s: seconds in which plain decoding produces the same worth.
        """
        self._lost_s = max(self._lost_s + min(seconds, _OUTLIER * predicted_s) - worth_s, 0.0)
        if self._lost_s <= max(self._balance_s, _CHANCE_STEPS * plain_s):
            return False
        self._lost_s = self._balance_s = 0.0
        return True
