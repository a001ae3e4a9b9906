"""Manages recurrent states: which sequence uses which, and which saved ones can be found again.

Layers with a delta rule store no tokens: everything before a row is one *state* of fixed size (with the last
inputs of their convolutions). All these layers' states of a sequence have one id, as a page has one in all
layers of its group. Ids only, no memory. A state is free or in one of three uses:

    live    a running sequence computes in it; the workers know its position
    asked   it will hold a running sequence's state at a position: the plan says so
    saved   it holds the state at the end of a prefix, found by the digest of its last page; read-only

    free ──enter──▶ live ──leave──▶ free            allocated from free states,
      └────ask────▶ asked ──settle──▶ saved ──▶     else the least recently used saved one

While a state moves to or from a tier below (`kv_tier.py`), it is held and has no other owner.

So saved states use spare memory, and no running sequence ever waits for them. Pages can match any prefix,
states only prefixes where one was saved: a hit ends at a saved state, and the rest is computed again. States
are saved only at the end of a page (`_save_positions`):

* where a new request diverges from what others have computed, as that prefix has proven to be shared;
* at the end of a prompt, before its last token: for the same prompt again, and for its continuations;
* periodically, in one state that moves along with its sequence: for preemption, and for the next turn.

Steps run in order, and within a step states are read before any is written, so an id can go to its next owner
at once, as a page does. Called by `kv_cache_manager.py`; `cluster/step/scheduler_output.py` has a diagram of
a step.

Shape legend: R requests in the step, M requested states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..step.scheduler_output import IntArray, SchedulerOutput, StateEntry, StateSaves
from ..step.sequence import SlotTable
from ..step.step_outcome import StepOutcome

MOVES_PAGES = 4  # pages between the positions at which a sequence's moving state is saved


class _PlannedSave(NamedTuple):
    """A state of the first `position` tokens, to be saved; `moves`: it replaces the moving state."""

    position: int
    state: int
    moves: bool


class RecurrentStateManager:
    """Manages the ids of recurrent states. `saved` maps digests to states, least recently used first."""

    def __init__(self, num_states: int, num_slots: int, page_size: int, *, saves: bool) -> None:
        self.num_states = num_states
        self.saved: OrderedDict[bytes, int] = OrderedDict()
        self._page_size, self._move = page_size, page_size * MOVES_PAGES
        self._saves = saves
        self._free = list(range(num_states - 1, -1, -1))  # a stack with low ids on top
        self._live: dict[int, int] = {}  # by slot, as are the next two
        self._planned: dict[int, list[_PlannedSave]] = {}
        self._moving: dict[int, bytes] = {}  # digest of the slot's moving state in `saved`
        self._held: set[int] = set()  # by moves to or from a tier
        self._held_alone: set[int] = set()  # of these, those that are not saved, and free afterwards
        # Positions at which a slot's sequence is saved, in addition to periodic ones; 0 for none.
        self._branch_S = np.zeros(num_slots, dtype=np.int32)
        self._prompt_end_S = np.zeros(num_slots, dtype=np.int32)

    @property
    def num_available(self) -> int:
        """Number of states that can be allocated."""
        return len(self._free) + len(self.saved) - len(self._held - self._held_alone)

    @property
    def num_blank(self) -> int:
        """Number of states that hold nothing."""
        return len(self._free)

    @property
    def usage(self) -> float:
        return len(self._live) / self.num_states

    # A sequence enters, runs and leaves.

    def admit(
        self, slot: int, digests: list[bytes], num_pages: int, num_shared: int, num_tokens: int
    ) -> StateEntry:
        """Allocate a state; the caller has checked `num_available`.

        The sequence begins after `num_pages` cached pages, at whose end a state is saved; `num_shared` pages
        of it have been computed before.
        """
        source = None
        if num_pages:
            source = self.saved[digests[num_pages - 1]]
            # evicted last; `_allocate` may return it if it is the only one
            self.saved.move_to_end(digests[num_pages - 1])
        state = self._allocate()
        assert state is not None, "a sequence enters without room"
        self._live[slot] = state
        self._branch_S[slot] = num_shared * self._page_size
        self._prompt_end_S[slot] = (num_tokens - 1) // self._page_size * self._page_size
        return StateEntry(state, source, num_pages * self._page_size)

    def plan_saves(self, slots_R: IntArray, first_R: IntArray, ends_R: IntArray) -> StateSaves | None:
        """Return the states to save in a step with rows from `first_R` or later to `ends_R` or earlier."""
        if not self._saves:
            return None
        passes_R = ends_R // self._move > first_R // self._move
        for marks_S in (self._branch_S, self._prompt_end_S):
            marks_R = marks_S[slots_R]
            passes_R |= (first_R < marks_R) & (marks_R <= ends_R)
        planned = [
            (index, each.position, each.state)
            for index in np.flatnonzero(passes_R).tolist()
            for each in self._plan_saves_of(int(slots_R[index]), int(first_R[index]), int(ends_R[index]))
        ]
        if not planned:
            return None
        columns = np.array(planned, dtype=np.int32).T
        return StateSaves(columns[0], columns[1], columns[2])

    def commit(self, plan: SchedulerOutput, outcome: StepOutcome, table: SlotTable) -> None:
        """Record a step's saved states. Called after full pages were inserted into the prefix cache."""
        saves = plan.saves
        if saves is None:
            return
        num_committed_R = outcome.num_known + np.maximum(outcome.num_out - 1, 0)
        spans = zip(
            (outcome.num_computed - num_committed_R).tolist(), outcome.num_computed.tolist(), strict=True
        )
        span_of = dict(zip(outcome.slots.tolist(), spans, strict=True))
        slots_M = plan.slots[saves.requests].tolist()
        for slot, position in zip(slots_M, saves.positions.tolist(), strict=True):
            before, after = span_of.get(slot, (0, 0))
            each = next((each for each in self._planned.get(slot, ()) if each.position == position), None)
            # not reached yet, saved by an earlier step, or the sequence has left
            if after < position or each is None:
                continue
            self._planned[slot].remove(each)
            digests, number = table.sequences[slot].digests, each.position // self._page_size
            if before < position and number <= len(digests):
                self._save(slot, each, digests[number - 1])
            else:  # a step that was already in flight passed the position, or its pages are not cached
                self._free.append(each.state)

    def free(self, slot: int) -> None:
        """Free a sequence's state and the states requested for it; saved ones remain."""
        self._free.append(self._live.pop(slot))
        self._free.extend(each.state for each in self._planned.pop(slot, ()))
        self._moving.pop(slot, None)

    # Saved states are removed.

    def evict(self, digest: bytes) -> None:
        """Free the state of a prefix after its last page is gone."""
        state = self.saved.pop(digest, None)
        if state is not None:
            self._release(state)

    def clear(self) -> None:
        for state in self.saved.values():
            self._release(state)
        self.saved.clear()
        self._moving.clear()

    def _release(self, state: int) -> None:
        """Free a state that is not saved any more, if need be when it has moved."""
        if state in self._held:
            self._held_alone.add(state)
        else:
            self._free.append(state)

    # A state moves to or from a tier below, like a page of `kv_cache_manager.GroupPages`.

    def page_of(self, digest: bytes) -> int | None:
        """Return the state at the end of this page, if it is saved."""
        return self.saved.get(digest)

    def num_computed(self, index: int) -> int:
        """Return how many pages are computed again without the state at the end of page `index`."""
        return index + 1

    def hold_new(self) -> int:
        state = self._allocate()
        assert state is not None, "the caller has checked `num_available`"
        self._held.add(state)
        self._held_alone.add(state)
        return state

    def hold(self, states: list[int]) -> None:
        self._held.update(states)

    def insert(self, digest: bytes, state: int) -> None:
        """Save a held state as that of a prefix; if it has one already, that one remains."""
        if digest not in self.saved:
            self.saved[digest] = state
            self._held_alone.remove(state)

    def drop(self, states: list[int]) -> None:
        for state in states:
            self._held.remove(state)
            if state in self._held_alone:
                self._held_alone.remove(state)
                self._free.append(state)

    def _plan_saves_of(self, slot: int, first: int, end: int) -> list[_PlannedSave]:
        """Return states for the positions that a sequence passes, including those of steps in flight."""
        planned = self._planned.setdefault(slot, [])
        wanted = self._save_positions(slot, first, end)
        for position, moves in wanted.items():
            if all(each.position != position for each in planned):
                state = self._next_moving(slot) if moves else self._allocate()
                if state is not None:
                    planned.append(_PlannedSave(position, state, moves))
        return sorted(each for each in planned if each.position in wanted)

    def _save_positions(self, slot: int, first: int, end: int) -> dict[int, bool]:
        """Return the positions in first + 1 .. end at which it is saved, and whether in its moving state.

        For a prompt's chunk before its end, the last position is most useful; for a step with drafts the
        first one, which is most likely to be passed.
        """
        branch, prompt_end = int(self._branch_S[slot]), int(self._prompt_end_S[slot])
        wanted = {mark: False for mark in (branch, prompt_end) if first < mark <= end}
        periodic = (first // self._move + 1 if first >= prompt_end else end // self._move) * self._move
        if first < periodic <= end and prompt_end not in wanted:
            wanted.setdefault(periodic, True)
        return wanted

    def _next_moving(self, slot: int) -> int | None:
        """Return the sequence's moving state if it was not evicted, else a new one."""
        digest = self._moving.pop(slot, b"")
        if digest not in self.saved or self.saved[digest] in self._held:
            return self._allocate()
        return self.saved.pop(digest)

    def _save(self, slot: int, planned: _PlannedSave, digest: bytes) -> None:
        if digest in self.saved:  # already saved by another sequence
            self.saved.move_to_end(digest)
            self._free.append(planned.state)
            return
        self.saved[digest] = planned.state
        if planned.moves:
            self._moving[slot] = digest

    def _allocate(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest, state in self.saved.items() if state not in self._held), None)
        return None if oldest is None else self.saved.pop(oldest)

    def check_invariants(self, slots: Iterable[int]) -> None:
        """Assert that each state is in exactly one use, and that each running sequence (by slot) has one."""
        assert self._live.keys() == set(slots), "running sequences and live states do not match"
        assert self._planned.keys() <= self._live.keys(), "a state is requested for no running sequence"
        planned = [each.state for states in self._planned.values() for each in states]
        all_states = [
            *self._free,
            *self._live.values(),
            *planned,
            *self.saved.values(),
            *self._held_alone,
        ]
        assert self._held_alone <= self._held <= self._held_alone | set(self.saved.values())
        assert sorted(all_states) == list(range(self.num_states)), "a state is lost, or has two owners"
        positions = [[each.position for each in states] for states in self._planned.values()]
        assert all(len(set(each)) == len(each) for each in positions), "a state is requested twice"
