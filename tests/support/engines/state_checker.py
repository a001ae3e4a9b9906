"""A model of the memory of recurrent states, checked by `cluster_checker.CheckingExecutor`.

Each state holds the tokens that it has seen, including the salt, and after them the rows of its records:
drafts, right or wrong. A state with two owners, saved at a position that was not passed, or read with another
prefix gives wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from manta.cluster.step.scheduler_output import SchedulerOutput


@dataclass(frozen=True)
class Held:
    """Tokens in a state, and records saved with it."""

    salt: str | None
    tokens: tuple[int, ...]
    records: tuple[int, ...] = ()

    def leads_to(self, tokens: list[int], salt: str | None) -> bool:
        """Whether the state after exactly these tokens can be made of it."""
        seen = self.tokens + self.records
        behind = len(self.tokens) <= len(tokens) <= len(seen)
        return self.salt == salt and behind and seen[: len(tokens)] == tuple(tokens)


class StateChecker:
    """The states of one executor. `num_saved` and `num_loaded` count events for tests."""

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._held: dict[int, Held] = {}
        self._state_of: dict[int, int] = {}  # by slot
        self.num_saved = self.num_loaded = 0

    def enter(self, plan: SchedulerOutput, salts: dict[int, str | None]) -> None:
        """All sources are read before anything is written."""
        begins: dict[int, Held] = {}
        for request in plan.admitted:
            entry, salt = request.state, salts[request.slot]
            assert entry is not None and 0 <= entry.state < self._num_states, "nobody runs without a state"
            assert entry.state not in begins, "two enter with one state"
            begins[entry.state] = Held(salt, ())
            if entry.source is not None:
                tokens = request.token_ids[: entry.num_tokens].tolist()
                assert self._held[entry.source].leads_to(tokens, salt), "a source holds something else"
                begins[entry.state] = self._held[entry.source]
                self.num_loaded += 1
            self._state_of[request.slot] = entry.state
        self._held |= begins

    def check_form(self, plan: SchedulerOutput) -> None:
        states = [self._state_of[slot] for slot in plan.slots.tolist()]
        assert len(set(states)) == len(states), "two requests have one state"
        if plan.saves is not None:
            requested = plan.saves.states.tolist()
            assert len(set(requested)) == len(requested) > 0, "a state is asked for twice"
            assert not set(requested) & set(states), "a state has two writers"
            assert all(0 <= state < self._num_states for state in requested)

    def run(self, slot: int, first: int, tokens: list[int], drafts: list[int], salt: str | None) -> None:
        """A pass over `tokens[first:]` and drafts, of which a number is right."""
        state = self._state_of[slot]
        assert self._held[state].leads_to(tokens[:first], salt), "a state has seen something else"
        self._held[state] = Held(salt, tuple(tokens), tuple(drafts))

    def save(self, plan: SchedulerOutput, first_R: list[int], computed_R: list[int]) -> None:
        """Save the requested positions that the pass has passed."""
        if plan.saves is None:
            return
        columns = (plan.saves.requests, plan.saves.positions, plan.saves.states)
        for r, position, state in zip(*(column.tolist() for column in columns), strict=True):
            if not first_R[r] < position <= computed_R[r]:
                continue
            held = self._held[self._state_of[int(plan.slots[r])]]
            if position <= len(held.tokens):
                held = Held(held.salt, held.tokens[:position])
            self._held[state] = held
            self.num_saved += 1
