"""Learns about an engine's draft trees: by class of load whether they pay, and how likely branches are.

`TreePolicy` decides whether drafts form trees or chains. The gain of trees is computed in each step that
grows them, from the same blocks and the same step costs as that of chains (`draft_trimming.tree_gain`); what
is left of it once growing is paid for, in relation to the step's worth, is averaged. Where rows are expensive
no branch is worth verifying, so nothing is left and chains are made. Then trees are grown in one step of 64,
because loads and texts change. The average raises the estimates of all draft lengths alike, so that no
drafts, chains and trees are one choice. Called by `draft_length_policy.py`.

`BranchModel` calibrates the chances of branches, as `acceptance_model.py` does those of the main path. Three
chances depend on the drafter and the text: that the target takes the second, third, .. best candidate
instead of the best, that it takes one of a block's candidates after such a token, and that it takes what is
copied from earlier text where drafts differ from it, or the reverse. Each has a factor: the number of
accepted tokens divided by the expected number, at the nodes that the accepted paths visited. Both numbers
fade, so that factors follow the text. Called by `cluster/scheduler/step_controller.py`.

Legend: F factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..step.scheduler_output import TreeGain, TreeOutcome, TreeShape
from .acceptance_model import FADE, NUM_BLOCKS

_GAIN_FADE = 0.95  # per step that grows trees; not tuned
# Steps with drafts from one that grows trees to the next while chains are better: trees that do not pay cost
# a 64th of the time to grow them.
_RETRY_STEPS = NUM_BLOCKS
# Not tuned.
_PRIOR = 4.0  # expected and accepted tokens at a factor of 1
_RANGE = 0.1, 10.0  # of factors, because few tokens are seen of each


@dataclass(slots=True)
class _LoadState:
    gain: float = 0.0  # mean share of the worth of chains; negative where trees lose
    weight: float = 0.0  # of the steps in `gain`, up to 1
    num_chains: int = 0  # consecutive steps with chains


class TreePolicy:
    """The choice of one engine. A class of load is `load_class` of the number of requests."""

    def __init__(self) -> None:
        self._states: dict[int, _LoadState] = {}

    def choose(self, load: int) -> bool:
        """Return whether trees are grown in the next step with drafts."""
        state = self._states.setdefault(load, _LoadState())
        is_tree = state.gain > 0.0 or not state.weight or state.num_chains >= _RETRY_STEPS
        state.num_chains = 0 if is_tree else state.num_chains + 1
        return is_tree

    def gain(self, load: int) -> float:
        """Return the expected gain of trees as a share of the worth of chains; 0 where chains are made."""
        return max(self._states[load].gain, 0.0) if load in self._states else 0.0

    def observe(self, load: int, gain: TreeGain, worth: float, rate: float) -> None:
        """Learn from a step that grew trees.

        Args:
            worth, rate: expected worth of such a step with chains, and worth per second.
        """
        state = self._states.setdefault(load, _LoadState())
        state.weight = _GAIN_FADE * state.weight + 1.0 - _GAIN_FADE
        share = (gain.worth - rate * gain.grow_s) / worth
        state.gain += (1.0 - _GAIN_FADE) / state.weight * (share - state.gain)


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
