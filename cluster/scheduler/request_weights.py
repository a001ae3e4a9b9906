"""Weighs the tokens of running requests against each other when draft lengths are chosen and drafts trimmed.

Called by `step_controller.py`. Legend: R requests of a step, S slots.
"""

from __future__ import annotations

import math

import numpy as np

from ..request.request import Request
from ..step.scheduler_output import FloatArray, IntArray

# Bounds, chosen, not measured: no request takes more than four fifths of the rows of an equal one.
_LOW, _HIGH = 0.5, 4.0
_PER_PRIORITY = 1.25


class RequestWeights:
    """The values of a token of each running request, 1 by default.

    * A request with a time-per-output-token target (`Request.tpot_ms`) has up to four times the weight while
      it is late, and down to half while it is early.
    * Each level of priority changes the weight by a quarter if the scheduling policy is by priority.
    * Background work has half the weight of online requests.

    Args:
        num_slots: S.
        by_priority: whether `Request.priority` changes the weight.
    """

    def __init__(self, num_slots: int, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._fixed_S = np.ones(num_slots, dtype=np.float32)
        self._target_s_S = np.full(num_slots, np.nan)
        self._first_s_S = np.full(num_slots, np.nan)  # time of the first token
        self._tokens_S = np.zeros(num_slots)  # after the first
        self._has_targets = False

    def admit(self, slot: int, request: Request) -> None:
        maximum = math.log(_HIGH, _PER_PRIORITY)
        level = min(max(-request.priority, -maximum), maximum) if self._by_priority else 0.0
        self._fixed_S[slot] = _PER_PRIORITY**level * (_LOW if request.background else 1.0)
        self._target_s_S[slot] = np.nan if request.tpot_ms is None else request.tpot_ms / 1e3
        self._first_s_S[slot], self._tokens_S[slot] = np.nan, 0.0
        self._has_targets = self._has_targets or request.tpot_ms is not None

    def count_tokens(self, slots_R: IntArray, num_tokens_R: IntArray, now_s: float) -> None:
        if not self._has_targets:
            return
        began_R = ~np.isnan(self._first_s_S[slots_R])
        self._tokens_S[slots_R] += np.where(began_R, num_tokens_R, 0)
        self._first_s_S[slots_R[~began_R & (num_tokens_R > 0)]] = now_s

    def of(self, slots_R: IntArray, now_s: float) -> FloatArray:
        """Return the weights of these requests, fp32 [R]."""
        if not self._has_targets:
            return self._fixed_S[slots_R]
        due_s_R = self._target_s_S[slots_R] * (self._tokens_S[slots_R] + 1)
        late_R = ((now_s - self._first_s_S[slots_R]) / due_s_R) ** 2
        late_R = np.where(np.isnan(late_R), 1.0, np.clip(late_R, _LOW, _HIGH))
        return (self._fixed_S[slots_R] * late_R).astype(np.float32)
