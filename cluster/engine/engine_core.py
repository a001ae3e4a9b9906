"""The engine core: takes requests, runs steps and returns updates.

It checks requests and times the parts of a step. The scheduler decides, the executor computes. Not
thread-safe except for `stats`, `timelines`, `block_groups` and `has_unfinished`, which only read. Used by
`LLM`, `AsyncEngine` and simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from ..config import EngineConfig
from ..errors import EngineDeadError, OverloadedError, RequestError, brief
from ..pages.page_files import PageFolder
from ..records.acceptance_slices import BlockGroup
from ..records.request_timeline import RequestTimeline
from ..request.request import FinishReason, Request, SamplingParams
from ..scheduler.scheduler import Scheduler
from ..speculation.acceptance_model import AcceptanceModel
from ..speculation.step_cost_model import StepCostModel
from ..step.clock import EngineClock
from ..step.executor import Executor
from ..step.limits import SchedulerConfig, check_output_so_far, check_request
from ..step.page_transfer import MovesPages
from ..step.scheduler_output import SchedulerOutput, StepResult
from ..step.step_outcome import SequenceUpdate
from .engine_stats import STEP_PARTS, EngineStats, take_stats
from .step_watchdog import StepWatchdog

_MOVE_WAIT_S = 0.005  # for pages that move, between looks for requests
_SAVE_S = 10.0  # most for the pages that are left to save at the end
_WARM_UP_TOKENS = 48  # a few steps of each draft length: each yields a token at least

__all__ = ["EngineCore", "SequenceUpdate"]


class EngineCore:
    """Runs steps: plans them with one scheduler, and computes them with one loaded executor.

    Steps and queues are timed by the executor's clock.

    Args:
        watch: gets the beginning and end of every step; `StepWatchdog.check` detects stalls.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        watch: StepWatchdog | None = None,
    ) -> None:
        self._executor, self._max_in_flight = executor, executor.info.max_in_flight
        self._watch = watch or StepWatchdog()
        self._drafter_generation = 0
        self._scheduler = Scheduler(SchedulerConfig.derive(config, executor.info))
        self._queues = self._scheduler.queues
        self._max_running, self._max_queued = config.max_num_seqs, config.max_num_queued_reqs
        self._has_waiting = False  # whether the last plan left an online request waiting
        self._clock = executor.clock
        self._seconds: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)

    @property
    def clock(self) -> EngineClock:
        """The executor's clock; `Request.arrival_s` must be a time of it."""
        return self._clock

    def add_request(self, request: Request) -> None:
        self.add_requests((request,))

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue the completions of one prompt, all or none: they differ in id, seed and previous output.

        Requests that arrive between two steps and will find a free slot do not count as waiting. Background
        work may wait without limit. Raises RequestError if they can never run, OverloadedError if the queue
        is full.
        """
        check_request(requests[0], self._scheduler.config)
        for request in requests:
            check_output_so_far(request, self._scheduler.config)
            if (name := request.request_id) in self._queues:
                raise RequestError(
                    f"request_id={brief(name)} is already running; give each request a unique id.",
                    param="request_id",
                )
        if not requests[0].background:
            self._check_queue(len(requests))
        for request in requests:
            self._queues.add(request)

    def _check_queue(self, count: int) -> None:
        maximum = self._max_queued
        if maximum is None:
            return
        free_slots = 0 if self._has_waiting else self._max_running - self._queues.num_online_running
        waiting = max(self._queues.num_online_waiting - free_slots, 0)
        if self._queues.num_online_waiting + count > maximum + free_slots:
            self._queues.counters.rejected["queue_full"] += count
            raise OverloadedError(
                f"{waiting} requests are waiting and {count} would join them "
                f"(max_num_queued_reqs={maximum}). "
                "Retry."
            )

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request before the next plan, without an update; return False if it is unknown."""
        return self._queues.abort(request_id, reason)

    def step(self) -> list[SequenceUpdate]:
        """Start as many steps as may be in flight, finish the oldest one, and return its updates, if any."""
        self.move_pages(idle=not self.has_unfinished)
        while len(self._scheduler.in_flight) < self._max_in_flight and (plan := self.plan()) is not None:
            self._begin_moves(idle=False)  # beside this step, and not after it: it does not use their pages
            self._submit(plan)
        if not self._scheduler.in_flight:
            self.move_pages(_MOVE_WAIT_S, idle=not self.has_unfinished)
            return []
        result = self._collect()
        return self.commit(result)

    def plan(self) -> SchedulerOutput | None:
        """Plan the next step; None if nothing can be done now. Plans are committed in order."""
        begin_s = self._clock()
        health = self._executor.drafter_health
        if health.generation != self._drafter_generation:
            self._drafter_generation = health.generation
            self._queues.tier.stop("the drafter was replaced, whose context its pages hold")
            self._watch.reset()
        self._scheduler.drafter.update_health(health)
        plan = self._scheduler.schedule(begin_s)
        self._has_waiting = self._queues.num_online_waiting > 0
        self._seconds["schedule"] += self._clock() - begin_s
        return plan

    def move_pages(self, wait_s: float = 0.0, *, idle: bool) -> None:
        """Begin and end moves of pages; wait for one if there is nothing else to do."""
        tier = self._queues.tier
        if not tier.is_busy:
            return
        for done in cast(MovesPages, self._executor).moved_pages(wait_s):  # an executor with a tier
            tier.on_moved(done)
        self._begin_moves(idle=idle)

    def _begin_moves(self, *, idle: bool) -> None:
        for transfer in self._queues.tier.transfers(self._clock(), idle=idle):
            cast(MovesPages, self._executor).move_pages(transfer)

    def _submit(self, plan: SchedulerOutput) -> None:
        begin_s = self._clock()
        self._watch.before_submit(plan)
        self._executor.submit(plan)
        self._watch.after_submit(passed_s := self._clock() - begin_s)
        self._seconds["execute"] += passed_s

    def _collect(self) -> StepResult:
        begin_s = self._clock()
        self._watch.before_collect()
        result = self._executor.collect()
        self._watch.after_collect(passed_s := self._clock() - begin_s)
        self._seconds["execute"] += passed_s
        return result

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
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
    def has_work(self) -> bool:
        """Whether `step` has anything to do, for requests or for pages to save while there are none."""
        return self.has_unfinished or self._queues.tier.is_busy

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queues.running or self._queues.waiting or self._scheduler.in_flight)

    def stats(self) -> EngineStats:
        return take_stats(self._scheduler, self._seconds)

    def timelines(self, name: str) -> list[RequestTimeline]:
        """Return the timelines of recent requests with this name, which is the engine's or the client's."""
        return self._scheduler.flight_recorder.timelines(name)

    def block_groups(self, is_visible: Callable[[str | None], bool]) -> list[BlockGroup]:
        """Return the verified blocks of recent requests; `is_visible` gets a request's owner."""
        return self._scheduler.flight_recorder.block_groups(is_visible)

    @property
    def costs(self) -> StepCostModel | None:
        """Step costs, to be saved between starts like `acceptance`; None if drafts do not depend on them."""
        return self._scheduler.controller.costs

    @property
    def acceptance(self) -> AcceptanceModel | None:
        return self._scheduler.controller.acceptance

    @property
    def would_draft(self) -> bool:
        """Whether a single request would get drafts, by present estimates; True if nothing is known."""
        return self._scheduler.controller.would_draft

    def reset_speculation(self) -> None:
        self._scheduler.controller.reset()

    def measure_steps(self, max_s: float) -> None:
        """Measure steps of every draft length, with a request made for it. No other request may run.

        Args:
            max_s: seconds after which the measurement ends.
        """
        max_tokens = min(_WARM_UP_TOKENS, self._scheduler.config.max_model_len - 1)
        if self.costs is None or max_tokens < 1:
            return
        begin_s, name = self._clock(), "warm-up"
        self._scheduler.controller.begin_warm_up()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        request = Request(
            request_id=name, prompt_token_ids=(0,), params=params, arrival_s=begin_s, uses_cache=False
        )
        self.add_request(request)
        while self.has_unfinished:
            self.step()
            if self._clock() - begin_s > max_s:
                self.abort(name)
        self.end_warm_up()

    def end_warm_up(self) -> None:
        """Forget the requests so far; only their step times are kept."""
        self._scheduler.end_warm_up()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages; running requests continue."""
        self._scheduler.kv_cache_manager.cache.clear()

    def close(self) -> None:
        self.save_pages_in_files()
        self._executor.close()

    @property
    def page_folder(self) -> PageFolder | None:
        """The files of the tier below the pages; None if there are none, or none any more."""
        return self._queues.tier.folder

    def save_pages_in_files(self) -> None:
        """Save for another start what the files lack."""
        if self.page_folder is not None:
            self.save_pages()

    def save_pages(self) -> None:
        """Save what the tier below the pages lacks; for some seconds at most."""
        end_s = self._clock() + _SAVE_S
        with suppress(EngineDeadError):
            while self._queues.tier.is_busy and not self._scheduler.in_flight and self._clock() < end_s:
                self.move_pages(_MOVE_WAIT_S, idle=True)

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or duplicated. For tests; it checks everything."""
        self._queues.check_invariants()
