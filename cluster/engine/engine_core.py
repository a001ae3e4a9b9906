"""The engine core: takes requests, runs steps and returns updates.

It checks requests, times the parts of a step and takes snapshots of counts. The scheduler decides, the
executor computes. Not thread-safe except for `stats`, `timelines`, `block_groups` and
`has_unfinished`, which only read. Used by `LLM`, `AsyncEngine` and simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..errors import OverloadedError, RequestError, brief
from ..metrics.metric import NO_COUNTS, HistogramCounts
from ..records.acceptance_slices import BlockGroup
from ..records.request_timeline import RequestTimeline
from ..request.request import FinishReason, Request, SamplingParams
from ..scheduler.scheduler import Scheduler
from ..speculation.acceptance_model import AcceptanceModel
from ..speculation.step_cost_model import StepCostModel
from ..step.clock import EngineClock
from ..step.executor import Executor
from ..step.limits import SchedulerConfig, check_output_so_far, check_request
from ..step.scheduler_output import DrafterUse, SchedulerOutput, StepResult
from ..step.step_outcome import SequenceUpdate
from .step_watchdog import StepWatchdog

_WARM_UP_TOKENS = 48  # a few steps of each draft length: each yields a token at least

__all__ = ["EngineCore", "EngineStats", "SequenceUpdate"]

STEP_PARTS: tuple[str, ...] = ("schedule", "execute", "draft", "verify", "sample", "inject", "commit")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are cumulative; `running`, `waiting` and `kv_usage` are current.

    Attributes:
        background_running, background_waiting: included in `running` and `waiting`; running ones may be
            paused.
        kv_usage: of the fullest pool, 0 to 1.
        prefix_cache_queries, prefix_cache_hits: tokens.
        num_drafts: (request, step) pairs that verified drafts.
        accepted_per_pos: [i] counts those of them in which draft i was accepted.
        step_seconds: seconds by STEP_PARTS; "execute" includes draft, verify, sample and inject.
        finished: ended requests by reason.
        drafter_up: whether drafts can be requested.
        drafter_losses: times that a drafter failed or was replaced.
        drafter_refilled_tokens: tokens computed again to give a drafter its context.
        drafter_rests: times that writing the drafter's context was stopped.
        drafter_unwritten_tokens: tokens computed in the meantime.
        drafter_use: use of a remote drafter.
        experts_read, routed_layers: their quotient is the number of experts that a routed layer reads in a
            step.
        num_proposed_tokens: drafts that were made.
        num_trimmed_tokens: drafts that were dropped for their margins before verification.
        num_copied_draft_tokens, num_copied_accepted_tokens: those of the verified and accepted drafts that
            were copied beside a drafter (`suffix_drafts`); of draft trees, all if the main path is a copy.
        skipped_passes: steps in which the drafter's pass was left out, as all drafts were copies.
        num_branch_tokens, num_accepted_branch_tokens: drafts of trees verified, and accepted, besides the
            chains of best candidates.
        num_trees: (request, step) pairs that verified drafts with branches.
        tree_depths, tree_widths: sums over these of the longest path, and of the most drafts of one position.
        target_rows: rows of the target's passes, including prompts.
        calibration_error: [i] is the difference between predicted and observed acceptance of draft i; empty
            if nothing is predicted.
        speculating_s: seconds of steps in which all requests decode and may draft (of identical steps a
            sample represents all).
        plain_s: seconds that plain decoding would have taken for these steps' tokens, by plain steps measured
            at such a load. `plain_s` / `speculating_s` is the speed-up.
        undrafted_s: seconds, by reason, of steps in which requests decoded without drafts.
        draft_length: drafts per block, as chosen last.
        rejected: requests that were not admitted, by reason.
        step_tokens: steps by their progress in tokens: computed prompt tokens and new tokens.
        page_lifetimes, page_idle_times, page_reuse_gaps: of a sample of pages
            (`cluster/kv_cache/prefix_cache.py`).
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
    drafter_rests: int = 0
    drafter_unwritten_tokens: int = 0
    drafter_use: DrafterUse = field(default_factory=DrafterUse)
    experts_read: int = 0
    routed_layers: int = 0
    num_proposed_tokens: int = 0
    num_trimmed_tokens: int = 0
    num_copied_draft_tokens: int = 0
    num_copied_accepted_tokens: int = 0
    skipped_passes: int = 0
    num_branch_tokens: int = 0
    num_accepted_branch_tokens: int = 0
    num_trees: int = 0
    tree_depths: int = 0
    tree_widths: int = 0
    target_rows: int = 0
    calibration_error: tuple[float, ...] = ()
    speculating_s: float = 0.0
    plain_s: float = 0.0
    undrafted_s: Mapping[str, float] = field(default_factory=dict[str, float])
    draft_length: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    step_tokens: HistogramCounts = NO_COUNTS
    page_lifetimes: HistogramCounts = NO_COUNTS
    page_idle_times: HistogramCounts = NO_COUNTS
    page_reuse_gaps: HistogramCounts = NO_COUNTS


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
        while len(self._scheduler.in_flight) < self._max_in_flight and (plan := self.plan()) is not None:
            self._submit(plan)
        if not self._scheduler.in_flight:
            return []
        result = self._collect()
        return self.commit(result)

    def plan(self) -> SchedulerOutput | None:
        """Plan the next step; None if nothing can be done now. Plans are committed in order."""
        begin_s = self._clock()
        health = self._executor.drafter_health
        if health.generation != self._drafter_generation:
            self._drafter_generation = health.generation
            self._watch.reset()
        self._scheduler.drafter.update_health(health)
        plan = self._scheduler.schedule(begin_s)
        self._has_waiting = self._queues.num_online_waiting > 0
        self._seconds["schedule"] += self._clock() - begin_s
        return plan

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
    def has_unfinished(self) -> bool:
        return bool(self._queues.running or self._queues.waiting or self._scheduler.in_flight)

    def stats(self) -> EngineStats:
        scheduler, queues = self._scheduler, self._queues
        counters = scheduler.counters
        return EngineStats(
            running=len(queues.running),
            waiting=len(queues.waiting),
            background_running=len(queues.running) - queues.num_online_running,
            background_waiting=len(queues.waiting) - queues.num_online_waiting,
            kv_usage=scheduler.kv_cache_manager.usage,
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
            drafter_up=scheduler.drafter.health.ready,
            drafter_losses=counters.drafter_losses,
            drafter_refilled_tokens=counters.drafter_refilled_tokens,
            drafter_rests=counters.drafter_rests,
            drafter_unwritten_tokens=counters.drafter_unwritten_tokens,
            drafter_use=counters.drafter_use,
            experts_read=counters.experts_read,
            routed_layers=counters.routed_layers,
            num_proposed_tokens=counters.num_proposed_tokens,
            num_trimmed_tokens=counters.num_trimmed_tokens,
            num_copied_draft_tokens=counters.num_copied_draft_tokens,
            num_copied_accepted_tokens=counters.num_copied_accepted_tokens,
            skipped_passes=counters.skipped_passes,
            num_branch_tokens=counters.num_branch_tokens,
            num_accepted_branch_tokens=counters.num_accepted_branch_tokens,
            num_trees=counters.num_trees,
            tree_depths=counters.tree_depths,
            tree_widths=counters.tree_widths,
            target_rows=counters.target_rows,
            calibration_error=scheduler.controller.calibration_error,
            speculating_s=scheduler.controller.speculating_s,
            plain_s=scheduler.controller.plain_s,
            undrafted_s={str(why): seconds for why, seconds in scheduler.controller.undrafted_s.items()},
            draft_length=scheduler.controller.last_choice().length,
            rejected=dict(counters.rejected),
            step_tokens=counters.step_tokens.counts(),
            page_lifetimes=scheduler.kv_cache_manager.times.lifetime.counts(),
            page_idle_times=scheduler.kv_cache_manager.times.idle.counts(),
            page_reuse_gaps=scheduler.kv_cache_manager.times.reuse_gap.counts(),
        )

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
        self._executor.close()

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or duplicated. For tests; it checks everything."""
        self._queues.check_invariants()
