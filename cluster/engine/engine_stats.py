"""Snapshots of an engine's counts and times, for metrics, autoscaling and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..metrics.metric import NO_COUNTS, HistogramCounts
from ..request.request import FinishReason
from ..scheduler.scheduler import Scheduler
from ..scheduler.scheduler_stats import StepCounts

STEP_PARTS: tuple[str, ...] = ("schedule", "execute", "draft", "verify", "sample", "inject", "commit")


@dataclass(slots=True, kw_only=True)
class EngineStats(StepCounts):
    """A snapshot. Counts are cumulative; `running`, `waiting` and `kv_usage` are current.

    Attributes:
        background_running, background_waiting: included in `running` and `waiting`; running ones may be
            paused.
        kv_usage: of the fullest pool, 0 to 1.
        finished: ended requests by reason.
        accepted_per_pos: [i] counts the (request, step) pairs of `num_drafts` in which draft i was accepted.
        step_seconds: seconds by STEP_PARTS; "execute" includes draft, verify, sample and inject.
        drafter_up: whether drafts can be requested.
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

    running: int = 0
    waiting: int = 0
    background_running: int = 0
    background_waiting: int = 0
    kv_usage: float = 0.0
    finished: Mapping[FinishReason, int] = field(default_factory=dict[FinishReason, int])
    accepted_per_pos: tuple[int, ...] = ()
    step_seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    drafter_up: bool = True
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


def take_stats(scheduler: Scheduler, step_seconds: Mapping[str, float]) -> EngineStats:
    """Return a snapshot; other threads may take it while steps run."""
    queues, counters, controller = scheduler.queues, scheduler.counters, scheduler.controller
    times = scheduler.kv_cache_manager.times
    return EngineStats(
        **counters.snapshot(),
        running=len(queues.running),
        waiting=len(queues.waiting),
        background_running=len(queues.running) - queues.num_online_running,
        background_waiting=len(queues.waiting) - queues.num_online_waiting,
        kv_usage=scheduler.kv_cache_manager.usage,
        finished=dict(counters.finished),
        accepted_per_pos=tuple(counters.accepted_per_pos.tolist()),
        step_seconds=dict(step_seconds),
        drafter_up=scheduler.drafter.health.ready,
        calibration_error=controller.calibration_error,
        speculating_s=controller.speculating_s,
        plain_s=controller.plain_s,
        undrafted_s={str(why): seconds for why, seconds in controller.undrafted_s.items()},
        draft_length=controller.last_choice().length,
        rejected=dict(counters.rejected),
        step_tokens=counters.step_tokens.counts(),
        page_lifetimes=times.lifetime.counts(),
        page_idle_times=times.idle.counts(),
        page_reuse_gaps=times.reuse_gap.counts(),
    )
