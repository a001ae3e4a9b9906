"""Simulates a trace of arrivals on a layout: the real scheduler over a simulated executor.

Each engine (`simulated_engine.py`) has a clock of its own. An arrival goes to the engine with the fewest
requests, like HAProxy's leastconn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..hardware.memory_plan import MemoryPlan
from ..hardware.model_pair import LayoutDemand, ModelPair
from ..hardware.parallel_layouts import ParallelLayout
from ..hardware.step_time import StepTimes
from .load_driver import Served
from .simulated_engine import PlanCost, simulated_engine, simulated_request


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """A request of a trace: its arrival time in seconds and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency bounds that a request must meet to count towards goodput; None for no bound."""

    tpot_s: float | None = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Results of a trace: tokens/s and share of requests within the SLO, 95th percentiles of latencies."""

    goodput: float
    kept: float
    ttft_s: float
    tpot_s: float


def play(
    trace: Sequence[TraceArrival],
    times: StepTimes,
    pair: ModelPair,
    layout: ParallelLayout,
    room: MemoryPlan,
    demand: LayoutDemand,
    slo: Slo,
) -> ReplayResult:
    """Simulate the trace. Requests longer than `demand.max_model_len` must have been filtered out."""
    if not layout.placement:
        pair = replace(pair, drafter=None, survival=())
    engines = [simulated_engine(pair, room, demand, PlanCost(times)) for _ in range(layout.replicas)]
    served: list[Served] = []
    first, *_ = arrivals = sorted(trace, key=lambda arrival: arrival.arrival_s)
    for number, arrival in enumerate(arrivals):
        for engine in engines:
            served += engine.run_until(arrival.arrival_s)
        request = simulated_request(number, arrival.prompt_tokens, arrival.output_tokens)
        min(engines, key=lambda engine: len(engine.running)).add(request, arrival.arrival_s)
    for engine in engines:
        served += engine.run_until(float("inf"))
    elapsed_s = max(request.last_s for request in served) - first.arrival_s
    kept = [request for request in served if _meets(request, slo)]
    return ReplayResult(
        goodput=sum(request.num_tokens for request in kept) / elapsed_s,
        kept=len(kept) / len(served),
        ttft_s=float(np.percentile([request.ttft_s for request in served], 95)),
        tpot_s=float(np.percentile([request.tpot_s for request in served], 95)),
    )


def _meets(request: Served, slo: Slo) -> bool:
    limits = ((request.tpot_s, slo.tpot_s), (request.ttft_s, slo.ttft_s))
    return all(limit is None or seconds <= limit for seconds, limit in limits)
