"""A simulated replica of a simulated fleet: a table in place of an engine.

How fast each of b running requests goes on, and what a token of a prompt costs, during which nothing else
goes on (chunked prefill slows everybody down by as much). Between two events all of a replica's requests go
on alike. `simulator.py` is the fine one; `tests/test_cluster_fleet.py` holds a replica of this module against
it. Moved by `fleet.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import expected_acceptance_length
from .made_up_plans import made_up_plan
from .simulator import LinearCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """One replica as a table.

    Attributes:
        step_s: seconds of a step of 1, 2, .. running requests; as many entries as can run at once.
        step_tokens: tokens that such a step brings each of them (the mean acceptance length).
        prompt_token_s: seconds that a token of a prompt costs.
        kv_tokens: that the pages hold.
        most_waiting: requests that may wait in the replica; more are refused.
        start_s: from being wanted to serving.
    """

    step_s: tuple[float, ...]
    step_tokens: tuple[float, ...]
    prompt_token_s: float
    kv_tokens: int
    most_waiting: int
    start_s: float

    @property
    def max_num_seqs(self) -> int:
        return len(self.step_s)

    @classmethod
    def of(
        cls, cost: LinearCost, survival: Sequence[float], max_num_seqs: int, kv_tokens: int, start_s: float
    ) -> ReplicaModel:
        """An engine of these costs that drafts as many tokens as pay, whatever number of requests it has."""
        best = [_best_step(cost, survival, batch) for batch in range(1, max_num_seqs + 1)]
        return cls(
            step_s=tuple(step_s for step_s, _ in best),
            step_tokens=tuple(tokens for _, tokens in best),
            prompt_token_s=cost.verify_row_s,
            kv_tokens=kv_tokens,
            most_waiting=max_num_seqs,
            start_s=start_s,
        )


def _best_step(cost: LinearCost, survival: Sequence[float], batch: int) -> tuple[float, float]:
    """Seconds and tokens per request of the step that brings most tokens a second."""
    steps: list[tuple[float, float]] = []
    for drafts in range(len(survival) + 1):
        timings = cost(made_up_plan([1] * batch, [1 + drafts] * batch, [drafts] * batch))
        steps.append((timings.draft_s + timings.verify_s, expected_acceptance_length(survival, drafts + 1)))
    return max(steps, key=lambda step: step[1] / step[0])


class Replica:
    """A replica's requests and how far they are. Its fleet moves them.

    Attributes:
        number: its name.
        born_s: when it was wanted.
        place: among those that serve; -1 for one that does not, or no more.
        running: heap of (the work at which it ends, request).
        done: tokens that a request would have got that was there from the beginning.
        at_s: when `done` was true.
        free_s: prompts are computed until then, and nothing else is.
        kv_tokens: that its running requests hold, at their ends.
        finished, tokens: requests that ended, and their tokens.
        version: grows when the next end moves; an announced end of an older one is void.
    """

    __slots__ = (
        "_model", "at_s", "born_s", "done", "finished", "free_s", "kv_tokens", "number", "place", "running",
        "tokens", "version", "waiting",
    )  # fmt: skip

    def __init__(self, model: ReplicaModel, number: int, born_s: float) -> None:
        self._model = model
        self.number = number
        self.born_s = born_s
        self.place = -1
        self.running: list[tuple[float, int]] = []
        self.waiting: deque[int] = deque()
        self.done = self.at_s = self.free_s = 0.0
        self.kv_tokens = self.finished = self.tokens = self.version = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def pace(self, batch: int) -> float:
        """Tokens a second of each of so many requests."""
        return self._model.step_tokens[batch - 1] / self._model.step_s[batch - 1]

    def advance(self, now_s: float) -> None:
        """Let its requests go on until now."""
        begin_s = max(self.at_s, self.free_s)
        if self.running and now_s > begin_s:
            self.done += (now_s - begin_s) * self.pace(len(self.running))
        self.at_s = now_s
