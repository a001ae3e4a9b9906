"""Decides whether the drafts of an engine's steps form trees or chains, by class of load.

The gain of trees is computed in each step that grows them, from the same blocks and the same step costs as
that of chains (`draft_trimming.tree_gain`); what is left of it once growing is paid for, in relation to the
step's worth, is averaged. Where rows are expensive no branch is worth verifying, so nothing is left and
chains are made. Then trees are grown in one step of 64, because loads and texts change. The average raises
the estimates of all draft lengths alike, so that no drafts, chains and trees are one choice. Called by
`draft_length_policy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..step.scheduler_output import TreeGain
from .acceptance_model import NUM_BLOCKS

_FADE = 0.95  # per step that grows trees; not tuned
# Steps with drafts from one that grows trees to the next while chains are better: trees that do not pay cost
# a 64th of the time to grow them.
_RETRY_STEPS = NUM_BLOCKS


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
        state.weight = _FADE * state.weight + 1.0 - _FADE
        share = (gain.worth - rate * gain.grow_s) / worth
        state.gain += (1.0 - _FADE) / state.weight * (share - state.gain)
