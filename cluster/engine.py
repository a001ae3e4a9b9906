"""The engine: requests in, updates out, one step after the other. `step` is all there is to it.

Checks requests, times the parts of a step, snapshots figures. Decisions are the scheduler's; computing is the
executor's. Not thread-safe but for `stats` and `has_unfinished`, which only read. Used by `LLM`, by
`AsyncEngine` and by simulations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .config import EngineConfig
from .errors import OverloadedError, RequestError
from .executor import Executor
from .limits import SchedulerConfig, check_output_so_far, check_request
from .outcome import SequenceUpdate
from .plan import SchedulerOutput, StepResult
from .request import FinishReason, Request
from .scheduler import Scheduler

__all__ = ["Engine", "EngineStats", "SequenceUpdate"]

STEP_PARTS: tuple[str, ...] = ("schedule", "execute", "draft", "verify", "sample", "inject", "commit")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are cumulative; `running`, `waiting` and `kv_usage` are of now.

    `background_running` and `background_waiting` are among `running` and `waiting`; who runs may pause.
    `kv_usage` (0 to 1) is of the fullest pool. `prefix_cache_*` count tokens. `num_drafts` counts requests x
    steps that verified drafts, and `accepted_per_pos[i]` in how many of them draft i was accepted.
    `step_seconds` sums up the STEP_PARTS;
    "execute" holds draft, verify, sample and inject. `finished` counts ended requests by reason.
    `drafter_up` says whether drafts may be asked for; `drafter_losses` counts how often a drafter failed or
    was replaced, `drafter_refilled_tokens` what was computed anew to give the next one its context.
    """

    running: int
    waiting: int
    background_running: int
    background_waiting: int
    kv_usage: float
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    finished: dict[FinishReason, int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]
    step_seconds: dict[str, float]
    drafter_up: bool = True
    drafter_losses: int = 0
    drafter_refilled_tokens: int = 0


class Engine:
    """One scheduler over one executor.

    Args:
        config: settings.
        executor: loaded and ready.
        clock: seconds, for the timing of steps and queues; `Request.arrival_s` is on the same clock.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(SchedulerConfig.derive(config, executor.info))
        self._roster = self._scheduler.roster
        self._max_queued = config.max_num_queued_reqs
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)

    def add_request(self, request: Request) -> None:
        """Queue one request; see `add_requests`."""
        self.add_requests((request,))

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue the completions of one prompt, all or none.

        They differ in id, seed and output so far; the rest is checked once. Raises RequestError if they can
        never run, OverloadedError if they cannot now; background work waits as long as it takes.
        """
        check_request(requests[0], self._scheduler.config)
        for request in requests:
            check_output_so_far(request, self._scheduler.config)
            if (name := request.request_id) in self._roster:
                raise RequestError(
                    f"request_id={name!r} is already running; give each request an id of its own.",
                    param="request_id",
                )
        waiting, most = self._roster.num_online_waiting, self._max_queued
        if most is not None and not requests[0].background and waiting + len(requests) > most:
            raise OverloadedError(
                f"{waiting} requests are waiting and {len(requests)} would join them "
                f"(max_num_queued_reqs={most}). Retry."
            )
        for request in requests:
            self._roster.add(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request before the next plan; False if it is not here. Its tokens in flight are dropped.

        Args:
            request_id: whose; the caller knows it ended, so no update follows.
            reason: "stop" when a stop string was found in its text.
        """
        return self._roster.abort(request_id, reason)

    def step(self) -> list[SequenceUpdate]:
        """Finish one step, after starting as many as may be in flight; an empty list if there is nothing to
        do, or if it brought no tokens."""
        while self._scheduler.num_in_flight < self._executor.info.max_in_flight:
            plan = self.plan()
            if plan is None:
                break
            self._submit(plan)
        if not self._scheduler.num_in_flight:
            return []
        begin_s = self._clock()
        result = self._executor.collect()
        self._seconds["execute"] += self._clock() - begin_s
        return self.commit(result)

    def _submit(self, plan: SchedulerOutput) -> None:
        begin_s = self._clock()
        self._executor.submit(plan)
        self._seconds["execute"] += self._clock() - begin_s

    def plan(self) -> SchedulerOutput | None:
        """Decide the next step; None if there is nothing to do before one in flight ends. Plans are committed
        in their order."""
        begin_s = self._clock()
        self._scheduler.drafter_is(self._executor.drafter_health)
        plan = self._scheduler.schedule(begin_s)
        self._seconds["schedule"] += self._clock() - begin_s
        return plan

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Take in what came of the oldest plan in flight."""
        begin_s = self._clock()
        updates = self._scheduler.commit(result, begin_s)
        seconds, timings = self._seconds, result.timings
        seconds["draft"] += timings.draft_s
        seconds["verify"] += timings.verify_s
        seconds["sample"] += timings.sample_s
        seconds["inject"] += timings.inject_s
        seconds["commit"] += self._clock() - begin_s
        return updates

    @property
    def has_unfinished(self) -> bool:
        return bool(self._roster.running or self._roster.waiting or self._scheduler.num_in_flight)

    def stats(self) -> EngineStats:
        scheduler, roster = self._scheduler, self._roster
        counters = scheduler.counters
        return EngineStats(
            running=len(roster.running),
            waiting=len(roster.waiting),
            background_running=len(roster.running) - roster.num_online_running,
            background_waiting=len(roster.waiting) - roster.num_online_waiting,
            kv_usage=scheduler.books.usage,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            preemptions=counters.preemptions,
            finished=dict(counters.finished),
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            accepted_per_pos=tuple(counters.accepted_per_pos.tolist()),
            step_seconds=dict(self._seconds),
            drafter_up=scheduler.drafter.ready,
            drafter_losses=counters.drafter_losses,
            drafter_refilled_tokens=counters.drafter_refilled_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages; what runs goes on."""
        self._scheduler.books.cache.clear()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._executor.close()

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or doubled. For tests; costs a look at everything."""
        self._roster.check_invariants()
