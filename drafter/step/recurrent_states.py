"""Tracks which recurrent state each request slot has, and how many tokens each state has consumed.

A mirror of `cluster/kv_cache/recurrent_state_manager.py`, as `request_states.py` is of pages: plans and
results update it. The states themselves are in `compute/memory/recurrent_state_cache.py`, written by layers;
their ids are that memory's slots. This module keeps only `stands`, the number of tokens in each state:

    a state's tokens    0 .. stands - 1 | accepted drafts | first row of the next pass
                        in the state    | in its records

The next pass folds (first row's position - `stands`) records into the state, for the sequence itself or for
one that starts from a copy of it. Called by `request_states.RequestStates`, in its order.

Legend: S slots of requests, Z states, R requests of a step, B admitted requests, M saves.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...cluster.step.scheduler_output import BoolArray, SchedulerOutput, StateSaves
from ..compute.memory.recurrent_state_cache import Save, StateMemory, StateRows
from .inputs.row_layout import Ints, StepRequests


class RecurrentStates:
    """Maps request slots to states and counts the tokens each state has consumed.

    Args:
        num_slots: capacity in running requests.
    """

    def __init__(self, memory: StateMemory, num_slots: int) -> None:
        self._memory = memory
        self._state_S = np.zeros(num_slots, dtype=np.int64)
        self._positions_Z = np.zeros(memory.num_slots, dtype=np.int64)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a state is, [A, Z, ...] each: its memory, and its number of tokens."""
        return *self._memory.tensors, torch.from_numpy(self._positions_Z)[None, :, None]

    def apply(self, plan: SchedulerOutput) -> None:
        """Initialize the states of admitted requests with zeros or a copy."""
        admitted = [(request.slot, request.state) for request in plan.admitted if request.state is not None]
        if not admitted:
            return
        for slot, entry in admitted:
            self._state_S[slot] = entry.state
        copied = [(e.source, e.state) for _, e in admitted if e.source not in (None, e.state)]
        if copied:  # before any is written: a source may have been reassigned in this plan
            sources_B, targets_B = np.array(copied, dtype=np.int64).T.copy()
            self._memory.copy(sources_B, targets_B)
            self._positions_Z[targets_B] = self._positions_Z[sources_B]
        fresh = [(e.state, e.num_tokens) for _, e in admitted if e.source is None]
        if fresh:
            fresh_B, positions_B = np.array(fresh, dtype=np.int64).T.copy()
            self._memory.reset(fresh_B)
            self._positions_Z[fresh_B] = positions_B

    def rows(self, r: StepRequests) -> StateRows:
        """Return what layers do in a step's pass."""
        states_R = self._state_S[r.slots_R]
        # A dummy step may repeat earlier rows: clamp at 0.
        pending_R = np.maximum(r.first_R - self._positions_Z[states_R], 0)
        assert (pending_R <= self._memory.max_drafts).all(), "a state has not seen what comes before the rows"
        return StateRows(
            slots_R=states_R,
            num_rows_R=r.num_rows_R,
            num_drafts_R=r.num_drafts_R,
            pending_R=pending_R,
            saves=self._saves(r),
        )

    def _saves(self, r: StepRequests) -> tuple[Save, ...]:
        """Return the planned saves at positions that known rows pass."""
        if (saves := r.plan.saves) is None:
            return ()
        known_M = _passed(saves, r.first_R, r.begin_R)
        num_rows_M = saves.positions - r.first_R[saves.requests]
        columns = (saves.requests, num_rows_M, saves.states)
        return tuple(map(Save._make, zip(*(column[known_M].tolist() for column in columns), strict=True)))

    def advance(self, r: StepRequests, counts_R: Ints) -> None:
        """Record a finished pass that produced `counts` tokens per request: accepted drafts, and one more."""
        self._positions_Z[self._state_S[r.slots_R]] = r.begin_R
        if (saves := r.plan.saves) is None:
            return
        known_M = _passed(saves, r.first_R, r.begin_R)
        self._positions_Z[saves.states[known_M]] = saves.positions[known_M]
        is_passed_M = _passed(saves, r.begin_R, r.begin_R + counts_R - 1)
        if is_passed_M.any():  # a save there is the state before the drafts, and their records
            requests_M, targets_M = saves.requests[is_passed_M], saves.states[is_passed_M].astype(np.int64)
            self._memory.copy(self._state_S[r.slots_R[requests_M]], targets_M)
            self._positions_Z[targets_M] = r.begin_R[requests_M]


def _passed(saves: StateSaves, first_R: Ints, end_R: Ints) -> BoolArray:
    """Return which [M] saves have positions in (first, end] of their request."""
    return (first_R[saves.requests] < saves.positions) & (saves.positions <= end_R[saves.requests])
