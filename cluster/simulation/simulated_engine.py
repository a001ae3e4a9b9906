"""A simulated engine of a layout, and traces of arrivals played on several of them.

The real scheduler and policies run over an executor that only advances a clock. It leaves out HTTP, host time
and that layers with a sliding window free pages (all pages count as one pool). Decoding requests of a step
are summarized by their number, total rows and mean context; prompts are one chunk. Each engine has a clock of
its own, and an arrival goes to the engine with the fewest requests, like HAProxy's leastconn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config import EngineConfig, SpeculativeConfig
from ..engine.engine_core import EngineCore
from ..hardware.memory_estimate import MAX_ROWS, PAGE_SIZE, MemoryEstimate
from ..hardware.model_pair import LayoutDemand, ModelPair
from ..hardware.parallel_layouts import ParallelLayout
from ..hardware.step_time import NO_CHUNK, Chunk, StepTimes
from ..pages.kv_cache_groups import pages_for
from ..records.percentiles import percentiles
from ..request.request import Request, SamplingParams
from ..step.draft_shape import UNBRANCHED, DraftShape
from ..step.executor import ExecutorInfo
from ..step.scheduler_output import BoolArray, SchedulerOutput, StepTimings
from .load_driver import CompletedRequest, LoadDriver
from .simulated_executor import SimulatedExecutor

VOCAB = 2**15  # vocabulary of the simulated tokens, whose values do not matter


def simulated_engine(
    pair: ModelPair,
    memory: MemoryEstimate,
    demand: LayoutDemand,
    cost: Callable[[SchedulerOutput], StepTimings],
    *,
    adaptive: bool = True,
    draft_shape: DraftShape = UNBRANCHED,
    prefix_caching: bool = False,
    hardness: Callable[[str], float] = lambda request_id: 1.0,
) -> LoadDriver:
    """Return an engine of this pair with its clock at 0; without a drafter it decodes plainly.

    The length of the pair's survival curve is the largest draft length. `cost` returns the seconds of a step,
    `hardness` how hard a request's text is to draft (see `SimulatedExecutor`).
    """
    drafts = SpeculativeConfig(model="simulated", adaptive=adaptive, **draft_shape.settings())
    spec = drafts if pair.num_drafts else None
    config = EngineConfig(
        model="simulated",
        speculative_config=spec,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=MAX_ROWS,
        enable_prefix_caching=prefix_caching,
    )
    info = ExecutorInfo(
        num_pages=(pages_for(max(memory.kv_tokens, demand.max_model_len), PAGE_SIZE),),
        num_states=memory.num_states,
        page_size=PAGE_SIZE,
        max_model_len=demand.max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(),
        num_speculative_tokens=pair.num_drafts,
        dtype="bfloat16",
        device="simulated",
        draft_shape=draft_shape,
    )
    return LoadDriver(EngineCore(config, SimulatedExecutor(info, pair.survival, cost, hardness)))


def simulated_request(number: int, prompt_tokens: int, output_tokens: int) -> Request:
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=number)
    prompt = (number % VOCAB,) * prompt_tokens
    return Request(request_id=str(number), prompt_token_ids=prompt, params=params)


class PlanCost:
    """Estimates the seconds of a step, with its parts one after another; prompts may cost nothing."""

    def __init__(self, times: StepTimes, *, free_prompts: bool = False) -> None:
        self._times = times
        self._free_prompts = free_prompts

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        decodes_R = plan.samples & (plan.num_rows == plan.num_drafts + 1)
        chunk = NO_CHUNK if self._free_prompts else _chunk(plan, decodes_R)
        batch, rows = int(decodes_R.sum()), int(plan.num_rows[decodes_R].sum())
        context = float(plan.num_computed[decodes_R].mean()) if batch else 0.0
        times = self._times
        if times.overlaps:  # drafter and target run concurrently, so only the total is known
            block_rows = None
            if plan.needs_candidates and batch:
                block_rows = 1 + float(plan.block_drafts[decodes_R].mean())
            total = times.round(batch, rows / max(batch, 1), context, chunk, block_rows)
            return StepTimings(verify_s=total.total_s)
        written = rows + chunk.rows if plan.writes_context else 0
        return StepTimings(
            draft_s=self._draft_s(plan),
            verify_s=times.verify(batch, rows / max(batch, 1), context, chunk).total_s
            + (times.shaping().total_s if plan.needs_candidates else 0.0),
            inject_s=times.inject(written).total_s,
        )

    def _draft_s(self, plan: SchedulerOutput) -> float:
        drafted_R = plan.num_drafts > 0
        count, drafts = int(drafted_R.sum()), int(plan.block_drafts.sum())
        if not count:
            return 0.0
        context = float(plan.num_computed[drafted_R].mean())
        return self._times.draft(count, 1 + drafts / count, context).total_s


def _chunk(plan: SchedulerOutput, decodes_R: BoolArray) -> Chunk:
    """Return the step's prompt rows as one chunk after their mean context."""
    if decodes_R.all():
        return NO_CHUNK
    mean = float(np.mean(plan.num_computed[~decodes_R]))
    return Chunk(int(plan.num_rows[~decodes_R].sum()), round(mean))


@dataclass(frozen=True, slots=True)
class TraceArrival:
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


def replay_trace(
    trace: Sequence[TraceArrival],
    times: StepTimes,
    pair: ModelPair,
    layout: ParallelLayout,
    memory: MemoryEstimate,
    demand: LayoutDemand,
    slo: Slo,
) -> ReplayResult:
    """Simulate the trace. Requests longer than `demand.max_model_len` must have been filtered out."""
    if not layout.placement:
        pair = replace(pair, drafter=None, survival=())
    engines = [simulated_engine(pair, memory, demand, PlanCost(times)) for _ in range(layout.replicas)]
    served: list[CompletedRequest] = []
    first, *_ = arrivals = sorted(trace, key=lambda arrival: arrival.arrival_s)
    for number, arrival in enumerate(arrivals):
        for engine in engines:
            served += engine.run_until(arrival.arrival_s)
        request = simulated_request(number, arrival.prompt_tokens, arrival.output_tokens)
        min(engines, key=lambda engine: len(engine.running)).add(request, arrival.arrival_s)
    for engine in engines:
        served += engine.run_until(float("inf"))
    elapsed_s = max(request.last_s for request in served) - first.arrival_s
    met = [request for request in served if _meets(request, slo)]
    return ReplayResult(
        goodput=sum(request.num_tokens for request in met) / elapsed_s,
        kept=len(met) / len(served),
        ttft_s=percentiles([request.ttft_s for request in served])["p95"],
        tpot_s=percentiles([request.tpot_s for request in served])["p95"],
    )


def _meets(request: CompletedRequest, slo: Slo) -> bool:
    limits = ((request.tpot_s, slo.tpot_s), (request.ttft_s, slo.ttft_s))
    return all(limit is None or seconds <= limit for seconds, limit in limits)
