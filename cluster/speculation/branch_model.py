"""Calibrates the chances of a draft tree's branches online, as `acceptance_model.py` does for its main path.

Three chances depend on the drafter and the text: that the target takes the second, third, .. best candidate
instead of the best, that it takes one of a block's candidates after such a token, and that it takes what is
copied from earlier text where drafts differ from it, or the reverse. Each has a factor: the
number of accepted tokens divided by the expected number, at the nodes that the accepted paths visited. Both
numbers fade, so that factors follow the text. Called by `cluster/scheduler/step_controller.py`.

Legend: F factors.
"""

from __future__ import annotations

import numpy as np

from ..step.scheduler_output import TreeOutcome, TreeShape
from .acceptance_model import FADE

# Not tuned.
_PRIOR = 4.0  # expected and accepted tokens at a factor of 1
_RANGE = 0.1, 10.0  # of factors, because few tokens are seen of each


class BranchModel:
    """Learns the factors of one engine's drafter, whose trees have nodes with at most `width` children."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.reset()

    def reset(self) -> None:
        """Forget everything, because the drafter was replaced."""
        self._expected_F, self._accepted_F = np.full((2, self._width + 1), _PRIOR)

    def shape(self, depth: int) -> TreeShape:
        """Return the shape of trees of this depth, with the factors of the estimated chances."""
        *factors, fork = np.clip(self._accepted_F / self._expected_F, *_RANGE).tolist()
        return TreeShape(depth, self._width, tuple(factors), fork)

    def observe(self, shape: TreeShape, outcome: TreeOutcome) -> None:
        """Learn from a step with trees of this shape."""
        prior, factors_F = (1.0 - FADE) * _PRIOR, np.array((*shape.factors, shape.fork))
        self._expected_F = FADE * self._expected_F + outcome.expected_F / factors_F + prior
        self._accepted_F = FADE * self._accepted_F + outcome.accepted_F + prior
