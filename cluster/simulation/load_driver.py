"""Drives a real or simulated engine with requests and records each request's times.

Real and simulated engines run through the same code, so that both get the same requests and are measured the
same way. An engine has a single clock, and nothing happens between two steps. Called by `trace_replay.py` and
`jobs/simulate/`; `load_generator.py` generates the load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..engine.engine_core import EngineCore
from ..request.request import Request
from .simulated_executor import VirtualClock

_POLL_INTERVAL_S = 0.002  # Polling interval on a real clock while the engine is idle.


@dataclass(slots=True)
class Served:
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
    """An engine, which reads its time from `clock`, and its running requests."""

    def __init__(self, engine: EngineCore, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.clock = clock
        self.running: dict[str, Served] = {}
        self.num_tokens = 0

    def add(self, request: Request, arrival_s: float) -> None:
        served = Served(request.request_id, arrival_s, len(request.prompt_token_ids))
        self.running[request.request_id] = served
        self.engine.add_request(request)

    def step(self) -> list[Served]:
        """Run one step and return the requests that finished in it."""
        ended: list[Served] = []
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

    def abort_all(self) -> None:
        """Abort all running requests and drain the engine, so that another engine can use its executor."""
        for request_id in list(self.running):
            self.engine.abort(request_id)
        self.running.clear()
        while self.engine.has_unfinished:
            self.engine.step()

    def run_until(self, end_s: float) -> list[Served]:
        """Step until `end_s`, or until all requests have finished if it is infinite.

        A step that begins before `end_s` runs to its end. Returns the requests that finished.
        """
        ended: list[Served] = []
        while self.clock() < end_s:
            if self.engine.has_unfinished:
                ended += self.step()
            elif end_s == float("inf"):
                break
            elif isinstance(self.clock, VirtualClock):
                self.clock.now_s = end_s
            else:
                time.sleep(min(_POLL_INTERVAL_S, max(end_s - self.clock(), 0.0)))
        return ended
