"""A replica of a simulated fleet: a table of step times and tokens per step instead of an engine.

The table is made of given costs or of a simulated engine. For the latter, the real scheduler runs in a closed
loop at a few loads, where prompts take no time (the table has their cost separately); seconds and tokens of
a step are interpolated linearly between loads. So the table contains what the policy chooses at every load.
`slots.py` uses it; `manta.cluster.simulation.simulated_executor` is the exact simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from manta.cluster.hardware.memory_plan import MAX_ROWS
from manta.cluster.hardware.step_time import Chunk
from manta.cluster.simulation.load_driver import closed_loop
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.speculation.acceptance_length import expected_acceptance_length
from manta.cluster.step.dummy_steps import dummy_step
from manta.jobs.simulate.node_engines import NodeEngine, Workload

MIN_REQUESTS = 12  # minimum number of counted requests per load


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """One replica as a table.

    Attributes:
        step_s: seconds of a step with 1, 2, ... running requests; one entry for each possible number.
        step_tokens: tokens of each request in such a step (the mean acceptance length).
        prompt_token_s: seconds per token of a prompt.
        kv_tokens: capacity of the pages in tokens.
        max_waiting: maximum waiting requests of the replica; more are refused.
        start_s: seconds from the decision to start it to serving.
    """

    step_s: tuple[float, ...]
    step_tokens: tuple[float, ...]
    prompt_token_s: float
    kv_tokens: int
    max_waiting: int
    start_s: float

    @property
    def max_num_seqs(self) -> int:
        return len(self.step_s)

    @classmethod
    def of(
        cls, cost: LinearCost, survival: Sequence[float], max_num_seqs: int, kv_tokens: int, start_s: float
    ) -> ReplicaModel:
        """Return an engine of these costs that drafts the fastest length at every number of requests."""
        best = [_best_step(cost, survival, batch) for batch in range(1, max_num_seqs + 1)]
        return cls(
            step_s=tuple(step_s for step_s, _ in best),
            step_tokens=tuple(tokens for _, tokens in best),
            prompt_token_s=cost.verify_row_s,
            kv_tokens=kv_tokens,
            max_waiting=max_num_seqs,
            start_s=start_s,
        )


def _best_step(cost: LinearCost, survival: Sequence[float], batch: int) -> tuple[float, float]:
    """Return seconds and tokens per request of the step with the most tokens/s."""
    steps: list[tuple[float, float]] = []
    for drafts in range(len(survival) + 1):
        timings = cost(dummy_step([1] * batch, [1 + drafts] * batch, [drafts] * batch))
        steps.append((timings.draft_s + timings.verify_s, expected_acceptance_length(survival, drafts + 1)))
    return max(steps, key=lambda step: step[1] / step[0])


def loads_to_play(maximum: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... below `maximum`, and `maximum`."""
    return sorted({maximum, *(base << n for base in (2, 3) for n in range(20) if base << n < maximum), 1})


def replica_table(
    node_engine: NodeEngine, workload: Workload, max_num_seqs: int, start_s: float
) -> ReplicaModel:
    """Return the table of a simulated engine that runs at most `max_num_seqs` requests, or as many as fit."""
    maximum = min(max_num_seqs, node_engine.memory.max_num_seqs)
    loads = loads_to_play(maximum)
    played = [_play(node_engine, workload, load) for load in loads]
    batches = np.arange(1, maximum + 1)
    step_s, step_tokens = (np.interp(batches, loads, values) for values in zip(*played, strict=True))
    chunk = Chunk(MAX_ROWS, round(workload.prompt_tokens / 2))
    prompt_s = node_engine.times.round(0, 1, 0, chunk).total_s / MAX_ROWS
    return ReplicaModel(
        step_s=tuple(np.maximum.accumulate(step_s).tolist()),
        step_tokens=tuple(step_tokens.tolist()),
        prompt_token_s=prompt_s,
        kv_tokens=node_engine.memory.kv_tokens,
        max_waiting=maximum,
        start_s=start_s,
    )


def _play(node_engine: NodeEngine, workload: Workload, load: int) -> tuple[float, float]:
    """Return the mean seconds of a step and its tokens per request."""
    measured = max(load, MIN_REQUESTS)
    engine = node_engine.engine(free_prompts=True)
    observed = closed_loop(engine, lambda number, share: workload.request(number, share), load, measured)
    return observed.seconds / observed.steps, observed.num_tokens / observed.steps / load
