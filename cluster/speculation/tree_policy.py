"""Learns about an engine's draft trees: by class of load whether they pay, and how likely branches are.

`TreeGains` decides whether drafts form trees or chains. The gain of trees is computed in each step that
grows them, from the same blocks and the same step costs as that of chains (`draft_trimming.tree_gain`); what
is left of it once growing is paid for, in relation to the step's worth, is averaged, as is the number of
nodes worth verifying. Where rows are expensive no branch is worth verifying, so nothing is left and chains
are made. Then trees are grown in one step of 64, because loads and texts change. The average raises the
estimates of all draft lengths alike, so that no drafts, chains and trees are one choice. Called by
`draft_length_policy.py`.

`BranchModel` calibrates the chances of branches, as `acceptance_model.py` does those of the main path. Three
chances depend on the drafter and the text: that the target takes the second, third, .. best candidate
instead of the best, that it takes one of a block's candidates after such a token, and that it takes what is
copied from earlier text where drafts differ from it, or the reverse. Each has a factor: the number of
accepted tokens divided by the expected number, at the nodes that the accepted paths visited. Both numbers
fade, so that factors follow the text. Called by `draft_shaper.py`.

Legend: F factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..step.scheduler_output import TreeGain, TreeOutcome, TreeShape
from .acceptance_model import FADE, RIDGE, UPDATE_STEPS
from .loss_budget import RETRY_STEPS

# As many steps as the acceptance model learns from at once. With those of `FADE` trees have 0.990 of the
# speed of chains instead of 0.994, where neither is better (4 requests, "rows are free"; six seeds).
_NEWEST = 1.0 / UPDATE_STEPS


@dataclass(slots=True)
class TreeGains:
    """The mean gain of trees at one class of load, and what is made next there."""

    mean: float = 0.0  # share of the worth of chains; negative where trees lose
    num_nodes: float = 0.0  # mean number of nodes worth verifying; 0 while nothing is known
    weight: float = 0.0  # of the steps in these means, up to 1
    num_chains: int = 0  # consecutive steps with chains

    def choose(self) -> bool:
        """Return whether trees are grown in the next step with drafts."""
        is_tree = self.mean > 0.0 or not self.weight or self.num_chains >= RETRY_STEPS
        self.num_chains = 0 if is_tree else self.num_chains + 1
        return is_tree

    @property
    def factor(self) -> float:
        """The expected worth of trees over that of chains; 1 where chains are made."""
        return 1.0 + max(self.mean, 0.0)

    def observe(self, gain: TreeGain, worth: float, rate: float) -> None:
        """Learn from a step that grew trees.

        Args:
            worth, rate: expected worth of such a step with chains, and worth per second.
        """
        self.weight += _NEWEST * (1.0 - self.weight)
        newest, share = _NEWEST / self.weight, (gain.worth - rate * gain.grow_s) / worth
        self.mean += newest * (share - self.mean)
        self.num_nodes += newest * (gain.num_nodes - self.num_nodes)


class BranchModel:
    """Learns the factors of one engine's drafter; nodes of its trees have at most `width` children."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.reset()

    def reset(self) -> None:
        """Forget everything, because the drafter was replaced."""
        self._expected_F, self._accepted_F = np.full((2, self._width + 1), RIDGE)

    def shape(self, depth: int) -> TreeShape:
        """Return the shape of trees of this depth, with the factors of the estimated chances."""
        *factors, fork = (self._accepted_F / self._expected_F).tolist()
        return TreeShape(depth, self._width, tuple(factors), fork)

    def observe(self, shape: TreeShape, outcome: TreeOutcome) -> None:
        """Learn from a step with trees of this shape."""
        prior, factors_F = (1.0 - FADE) * RIDGE, np.array((*shape.factors, shape.fork))
        self._expected_F = FADE * self._expected_F + outcome.expected_F / factors_F + prior
        self._accepted_F = FADE * self._accepted_F + outcome.accepted_F + prior
