"""The engine: requests in, updates out, one step after the other. `step` is all there is to it.

Checks requests, times the parts of a step, snapshots figures. Decisions are the scheduler's; computing is the
executor's. Not thread-safe but for `stats`, `lives`, `spent` and `has_unfinished`, which only read. Used by
`LLM`, by `AsyncEngine` and by simulations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .config import EngineConfig
from .errors import OverloadedError, RequestError, shown
from .executor import Executor
from .histogram import NO_COUNTS, HistogramCounts
from .label_values import Account
from .limits import SchedulerConfig, check_output_so_far, check_request
from .lives import Life
from .outcome import SequenceUpdate
from .plan import DrafterUse, SchedulerOutput, StepResult
from .request import FinishReason, Request
from .scheduler import Scheduler
from .speculation.acceptance_model import AcceptanceModel
from .speculation.step_cost_model import StepCostModel
from .spending import Spent
from .step_watch import StepWatch

__all__ = ["Engine", "EngineStats", "SequenceUpdate"]

STEP_PARTS: tuple[str, ...] = ("schedule", "execute", "draft", "verify", "sample", "inject", "commit")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are cumulative; `running`, `waiting` and `kv_usage` are of now.

    `background_running` and `background_waiting` are among `running` and `waiting`; who runs may pause.
    `kv_usage` (0 to 1) is of the fullest pool. `prefix_cache_*` count tokens. `num_drafts` counts requests
    x steps that verified drafts, and `accepted_per_pos[i]` in how many of them draft i was accepted.
    `num_proposed_tokens` counts drafts that were made, `num_trimmed_tokens` those that were cut for their
    margins before they were verified. `target_rows` counts rows of the target's passes, prompts' too.
    `calibration_error[i]` is how far the foreseen chances of draft i are from what came; empty if none are.
    `speculating_s` sums up seconds of steps in which all decode and which were free to draft (of steps
    that are all alike some stand for the others), `plain_s` what the tokens that they brought would have
    taken plainly, by the seconds of plain steps that were measured at such a load: `plain_s` by
    `speculating_s` is the speed-up. `undrafted_s` sums up, by reason, the seconds of steps in which
    requests decoded and none had drafts. `draft_length` is how long the blocks are that were chosen last.
    `rejected` counts requests that were not let in, by reason; `step_tokens` steps, by the tokens by
    which they got on: of prompts, and those that came out.
    `step_seconds` sums up the STEP_PARTS; "execute" holds draft, verify, sample and inject. `finished` counts
    ended requests by reason. `drafter_up` says whether drafts may be asked for; `drafter_losses` counts how
    often a drafter failed or was replaced, `drafter_refilled_tokens` what was computed anew to give one its
    context, `drafter_rests` how often that was not written any more, and `drafter_unwritten_tokens` what was
    computed meanwhile; `drafter_use` is of one in a process of its own. `experts_read` by `routed_layers` is
    how many experts' weights a routed layer reads in a step. The last three are of a sample of pages
    (`page_ages.py`).
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


class Engine:
    """One scheduler over one executor.

    Args:
        config: settings.
        executor: loaded and ready.
        clock: seconds, for the timing of steps and queues; `Request.arrival_s` is on the same clock.
        watch: is told of every step; whoever wants to know of stalls ticks it.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        watch: StepWatch | None = None,
    ) -> None:
        self._executor = executor
        self._watch = watch or StepWatch()
        self._drafter_generation = 0
        self._scheduler = Scheduler(SchedulerConfig.derive(config, executor.info))
        self._roster = self._scheduler.roster
        self._max_running, self._max_queued = config.max_num_seqs, config.max_num_queued_reqs
        self._left_waiting = False  # whether the last plan had no room for somebody
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)

    def add_request(self, request: Request) -> None:
        """Queue one request; see `add_requests`."""
        self.add_requests((request,))

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue the completions of one prompt, all or none.

        They differ in id, seed and output so far; the rest is checked once. Raises RequestError if they can
        never run, OverloadedError if they cannot now; background work waits as long as it takes. Who comes
        between two steps waits for a plan, not for a seat: where there are seats it is not counted.
        """
        check_request(requests[0], self._scheduler.config)
        for request in requests:
            check_output_so_far(request, self._scheduler.config)
            if (name := request.request_id) in self._roster:
                raise RequestError(
                    f"request_id={shown(name)} is already running; give each request an id of its own.",
                    param="request_id",
                )
        if not requests[0].background:
            self._check_queue(len(requests))
        for request in requests:
            self._roster.add(request)

    def _check_queue(self, count: int) -> None:
        most = self._max_queued
        if most is None:
            return
        seats = 0 if self._left_waiting else self._max_running - self._roster.num_online_running
        waiting = max(self._roster.num_online_waiting - seats, 0)
        if self._roster.num_online_waiting + count > most + seats:
            self._roster.counters.rejected["queue_full"] += count
            raise OverloadedError(
                f"{waiting} requests are waiting and {count} would join them (max_num_queued_reqs={most}). "
                "Retry."
            )

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
        self._watch.collecting()
        result = self._executor.collect()
        self._watch.collected(passed_s := self._clock() - begin_s)
        self._seconds["execute"] += passed_s
        return self.commit(result)

    def _submit(self, plan: SchedulerOutput) -> None:
        begin_s = self._clock()
        self._watch.submitting(plan)
        self._executor.submit(plan)
        self._watch.submitted(passed_s := self._clock() - begin_s)
        self._seconds["execute"] += passed_s

    def plan(self) -> SchedulerOutput | None:
        """Decide the next step; None if there is nothing to do before one in flight ends. Plans are committed
        in their order."""
        begin_s = self._clock()
        health = self._executor.drafter_health
        if health.generation != self._drafter_generation:
            self._drafter_generation = health.generation
            self._watch.forget()
        self._scheduler.update_drafter_health(health)
        plan = self._scheduler.schedule(begin_s)
        self._left_waiting = self._roster.num_online_waiting > 0
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
            target_rows=counters.target_rows,
            calibration_error=scheduler.controller.calibration_error,
            speculating_s=scheduler.controller.speculating_s,
            plain_s=scheduler.controller.plain_s,
            undrafted_s={str(why): seconds for why, seconds in scheduler.controller.undrafted_s.items()},
            draft_length=scheduler.controller.last_choice().length,
            rejected=dict(counters.rejected),
            step_tokens=counters.step_tokens.counts(),
            page_lifetimes=scheduler.books.times.lifetime.counts(),
            page_idle_times=scheduler.books.times.idle.counts(),
            page_reuse_gaps=scheduler.books.times.reuse_gap.counts(),
        )

    def lives(self, name: str) -> list[Life]:
        """What became of the last requests of this name, the engine's or the client's."""
        return self._scheduler.journal.lives(name)

    @property
    def costs(self) -> StepCostModel | None:
        """What steps take, to be kept between starts; None where drafts do not depend on it."""
        return self._scheduler.controller.costs

    @property
    def acceptance(self) -> AcceptanceModel | None:
        """How likely drafts are to stand, to be kept as well."""
        return self._scheduler.controller.acceptance

    @property
    def speculation_pays(self) -> bool:
        """Whether one request would have drafts, by what is known; True where nothing is."""
        return self._scheduler.controller.pays

    def forget_speculation(self) -> None:
        """Forget all that was learned of drafts and of the costs of steps."""
        self._scheduler.controller.forget(costs=True)

    def end_warm_up(self) -> None:
        """Leave the requests so far out of all figures, and forget what became of their drafts."""
        self._scheduler.end_warm_up()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def spent(self) -> dict[Account, Spent]:
        """What steps were for whom, so far; nothing before a request names an account."""
        return self._scheduler.spending.totals()

    def begin_trial(self) -> None:
        """The executor has a candidate beside its drafter from the next plan on (`TriesDrafters`)."""
        self._scheduler.drafter.begin_trial()

    def end_trial(self, *, promoted: bool) -> None:
        """It has one no more; `promoted`: that is the drafter now."""
        self._scheduler.drafter.end_trial(promoted=promoted)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages; what runs goes on."""
        self._scheduler.books.cache.clear()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._executor.close()

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or doubled. For tests; costs a look at everything."""
        self._roster.check_invariants()
