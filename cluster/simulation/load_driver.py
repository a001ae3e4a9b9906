"""Drives real or simulated engines under closed and open loads, and measures the outcome.

    closed   each of c clients sends its next request as soon as its last one finishes. Measurement begins
             after a warm-up (c requests by default) and ends after `measured` more. The first requests are
             shortened at random, so that clients do not run in lockstep.
    open     requests arrive at given times and go to the engine with the fewest requests. All are measured.

Real and simulated engines get the same requests and are measured the same way. An engine has a single clock,
and nothing happens between two steps. Called by `simulated_engine.py` and `jobs/simulate/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.engine_core import EngineCore
from ..engine.engine_stats import EngineStats
from ..records.percentiles import Percentiles, percentiles
from ..request.request import Request
from ..speculation.acceptance_length import mean_acceptance_length


@dataclass(slots=True)
class CompletedRequest:
    """A request and its times, in seconds of its engine's clock."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.last_s - self.first_s) / max(self.num_tokens - 1, 1)


class LoadDriver:
    """An engine and its running requests, timed by the engine's clock."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.running: dict[str, CompletedRequest] = {}
        self.num_tokens = 0

    def add(self, request: Request, arrival_s: float) -> None:
        served = CompletedRequest(request.request_id, arrival_s, len(request.prompt_token_ids))
        self.running[request.request_id] = served
        self.engine.add_request(request)

    def step(self) -> list[CompletedRequest]:
        ended: list[CompletedRequest] = []
        updates = self.engine.step()
        now_s = self.clock()
        for update in updates:
            served = self.running[update.request_id]
            if not served.num_tokens:
                served.first_s = now_s
            served.last_s = now_s
            served.num_tokens += len(update.token_ids)
            self.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                ended.append(self.running.pop(update.request_id))
        return ended

    def run_until(self, end_s: float) -> list[CompletedRequest]:
        """Step until `end_s`, or to the end of all requests if it is infinite; return the finished ones."""
        ended: list[CompletedRequest] = []
        while self.clock() < end_s:
            if self.engine.has_unfinished:
                ended += self.step()
            elif end_s == float("inf"):
                break
            else:
                self.clock.wait_until(end_s)
        return ended


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    seconds: float
    num_tokens: int
    num_engines: int
    served: tuple[CompletedRequest, ...]
    steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def user_tokens_per_s(self) -> float:
        rates = [1.0 / request.tpot_s for request in self.served if request.tpot_s > 0.0]
        return float(np.median(rates)) if rates else float("nan")

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_drafts, self.num_accepted_tokens)

    @property
    def drafts_per_block(self) -> float | None:
        """Mean number of drafts verified per request and step that verified any."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    def ttft_s(self) -> Percentiles:
        return percentiles([request.ttft_s for request in self.served])

    def tpot_s(self) -> Percentiles:
        return percentiles([request.tpot_s for request in self.served if request.num_tokens > 1])

    def e2e_s(self) -> Percentiles:
        return percentiles([request.e2e_s for request in self.served])


def closed_loop(
    driven: LoadDriver,
    make: Callable[[int, float], Request],
    clients: int,
    measured: int,
    warm_up: int | None = None,
) -> LoadMeasurement:
    """Run `clients` clients, each of which sends its next request as soon as its last one finishes.

    `make` returns request `number` with a share (0 to 1) of its length; `warm_up` is `clients` if None.
    """
    rng = np.random.default_rng(clients)
    for number in range(clients):
        driven.add(make(number, float(rng.uniform())), driven.clock())
    number, to_warm_up = clients, clients if warm_up is None else warm_up
    counted: list[CompletedRequest] = []
    before, begin_s, begin_tokens = driven.engine.stats(), driven.clock(), 0
    while len(counted) < measured:
        ended = driven.step()
        for _ in ended:
            driven.add(make(number, 1.0), driven.clock())
            number += 1
        if to_warm_up <= 0:
            counted += ended
        elif (to_warm_up := to_warm_up - len(ended)) <= 0:
            before, begin_s, begin_tokens = driven.engine.stats(), driven.clock(), driven.num_tokens
    seconds, num_tokens = driven.clock() - begin_s, driven.num_tokens - begin_tokens
    return _observed(seconds, num_tokens, counted, [(before, driven.engine.stats())])


def open_loop(
    engines: Sequence[LoadDriver], make: Callable[[int, float], Request], arrival_s: Sequence[float]
) -> LoadMeasurement:
    """Send requests at these ascending times and measure until the last one finishes."""
    served: list[CompletedRequest] = []
    before = [driven.engine.stats() for driven in engines]
    for number, at_s in enumerate(arrival_s):
        for driven in engines:
            served += driven.run_until(at_s)
        min(engines, key=lambda driven: len(driven.running)).add(make(number, 1.0), at_s)
    for driven in engines:
        served += driven.run_until(float("inf"))
    seconds = max(request.last_s for request in served) - arrival_s[0]
    stats = [(old, driven.engine.stats()) for old, driven in zip(before, engines, strict=True)]
    return _observed(seconds, sum(request.num_tokens for request in served), served, stats)


def _observed(
    seconds: float,
    num_tokens: int,
    served: Sequence[CompletedRequest],
    stats: Sequence[tuple[EngineStats, EngineStats]],
) -> LoadMeasurement:
    def grown(name: str) -> int:
        return sum(getattr(now, name) - getattr(before, name) for before, now in stats)

    return LoadMeasurement(
        seconds=seconds,
        num_tokens=num_tokens,
        num_engines=len(stats),
        served=tuple(served),
        steps=grown("steps"),
        num_drafts=grown("num_drafts"),
        num_draft_tokens=grown("num_draft_tokens"),
        num_accepted_tokens=grown("num_accepted_tokens"),
    )
