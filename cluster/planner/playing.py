"""A trace of arrivals played through a layout: the real scheduler over an executor that only takes time.

Each engine has a clock of its own; an arrival goes to the engine with the fewest requests, as HAProxy's
leastconn does. Left out: prefix hits, HTTP, and that layers with a window give pages back (the room's tokens
count as one pool).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import EngineConfig, SpeculativeConfig
from ..engine import Engine
from ..executor import ExecutorInfo
from ..pages import pages_for
from ..plan import SchedulerOutput, StepTimings
from ..request import Request, SamplingParams
from ..simulator import SimulatedExecutor, VirtualClock
from .layouts import Layout
from .pair import Demand, Pair
from .room import MAX_ROWS, PAGE_SIZE, Room
from .step_time import NO_CHUNK, Chunk, StepTimes

_VOCAB = 2**15  # of the simulated tokens, which nobody reads


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: when it came, in seconds, and how long it was, in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count; None asks nothing."""

    tpot_s: float | None = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a trace.

    Attributes:
        goodput: output tokens per second of the requests that kept the SLO, from first arrival to last token.
        kept: their share.
        ttft_s, tpot_s: the 95th percentile; of requests of one token there is no tpot.
    """

    goodput: float
    kept: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _Seen:
    arrival: Arrival
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.arrival.output_tokens - 1, 1)

    def keeps(self, slo: Slo) -> bool:
        limits = ((self.tpot_s, slo.tpot_s), (self.ttft_s, slo.ttft_s))
        return all(limit is None or seconds <= limit for seconds, limit in limits)


def play(
    trace: Sequence[Arrival],
    times: StepTimes,
    pair: Pair,
    layout: Layout,
    room: Room,
    demand: Demand,
    slo: Slo,
) -> Played:
    """Requests longer than `demand.max_model_len` must have been refused before."""
    engines = [_SimulatedEngine(times, pair, layout, room, demand) for _ in range(layout.replicas)]
    seen = [_Seen(arrival) for arrival in sorted(trace, key=lambda arrival: arrival.arrival_s)]
    for number, request in enumerate(seen):
        for engine in engines:
            engine.run_until(request.arrival.arrival_s)
        min(engines, key=lambda engine: len(engine.requests)).add(str(number), request)
    for engine in engines:
        engine.run_until(float("inf"))
    took_s = max(request.last_s for request in seen) - seen[0].arrival.arrival_s
    kept = [request for request in seen if request.keeps(slo)]
    return Played(
        goodput=sum(request.arrival.output_tokens for request in kept) / took_s,
        kept=len(kept) / len(seen),
        ttft_s=float(np.percentile([request.ttft_s for request in seen], 95)),
        tpot_s=float(np.percentile([request.tpot_s for request in seen], 95)),
    )


@dataclass
class _SimulatedEngine:
    times: StepTimes
    pair: Pair
    layout: Layout
    room: Room
    demand: Demand
    requests: dict[str, _Seen] = field(default_factory=dict[str, _Seen])

    def __post_init__(self) -> None:
        spec = SpeculativeConfig(model="simulated") if self.layout.placement else None
        config = EngineConfig(
            model="simulated",
            speculative_config=spec,
            max_num_seqs=self.room.max_num_seqs,
            max_num_batched_tokens=MAX_ROWS,
            enable_prefix_caching=False,
        )
        info = ExecutorInfo(
            num_pages=(pages_for(max(self.room.kv_tokens, self.demand.max_model_len), PAGE_SIZE),),
            page_size=PAGE_SIZE,
            max_model_len=self.demand.max_model_len,
            vocab_size=_VOCAB,
            eos_token_ids=(),
            num_speculative_tokens=self.pair.num_drafts if spec else 0,
            dtype="bfloat16",
            device="simulated",
        )
        self._clock = VirtualClock()
        executor = SimulatedExecutor(info, self.pair.survival, self._cost, self._clock.advance)
        self._engine = Engine(config, executor, self._clock)

    def add(self, name: str, seen: _Seen) -> None:
        self.requests[name] = seen
        params = SamplingParams(max_tokens=seen.arrival.output_tokens, ignore_eos=True, seed=int(name))
        prompt = (int(name) % _VOCAB,) * seen.arrival.prompt_tokens
        self._engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))

    def run_until(self, end_s: float) -> None:
        """Step until that time, or until there is nothing to do; a step that began before it is ended."""
        while self._engine.has_unfinished and self._clock.now_s < end_s:
            for update in self._engine.step():
                seen = self.requests[update.request_id]
                seen.first_s = seen.first_s or self._clock.now_s
                seen.last_s = self._clock.now_s
                if update.finish_reason is not None:
                    del self.requests[update.request_id]
        if not self._engine.has_unfinished and end_s != float("inf"):
            self._clock.now_s = max(self._clock.now_s, end_s)

    def _cost(self, plan: SchedulerOutput) -> StepTimings:
        """Decoding requests at their mean, prompts as one chunk."""
        decodes = plan.samples & (plan.num_rows == plan.num_drafts + 1)
        batch = int(decodes.sum())
        rows = round(float(plan.num_rows[decodes].mean())) if batch else 0
        context = round(float(plan.num_computed[decodes].mean())) if batch else 0
        chunk = NO_CHUNK
        if batch < plan.num_requests:
            contexts = plan.num_computed[~decodes]
            chunk = Chunk(int(plan.num_rows[~decodes].sum()), round(float(contexts.mean())))
        return StepTimings(verify_s=self.times.round(batch, rows, context, chunk).total_s)
