"""Composes the adaptive decisions of each step, and learns from completed steps. Called by the scheduler.

Legend: R requests of a step, online ones first; S slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..request.request import Request
from ..speculation.acceptance_model import NUM_BLOCKS, UPDATE_STEPS, AcceptanceModel
from ..speculation.draft_length_policy import DecodeBatch, DraftChoice, DraftLengthPolicy
from ..speculation.draft_shaper import DraftShaper
from ..speculation.draft_trimming import BETTER, TRIM_S
from ..speculation.step_cost_model import StepCostModel, StepLoad
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import BoolArray, FloatArray, IntArray, SchedulerOutput, StepResult
from ..step.step_outcome import StepOutcome
from .background_budget import BackgroundBudget, BackgroundWork
from .batch_halves import BatchMode, TwoBatchOverlap
from .request_queues import RequestWeights

_QUIET_S = 5.0  # without online requests, after which background steps may be longer
# Why requests decode without drafts: no drafter, not allowed for them, plain steps are measured, or are
# faster.
Undrafted = Literal["no_drafter", "not_asked", "measuring", "plain_is_faster"]
# Seconds of learning from a step on a current server's core; their share of the time of drafting steps is at
# most the difference that counts (`BETTER`) after the first 64.
_LEARN_S = 0.0002
_MAX_HOST_SHARE = 0.5  # of a step's own seconds; more time between steps was spent idle


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan that is not committed yet."""

    plan: SchedulerOutput
    planned_s: float
    num_online: int  # of its first requests, which are not background work
    choice: DraftChoice  # for its first kind of requests
    load: StepLoad
    weights_R: FloatArray
    mode: BatchMode | None  # if halves are possible
    remaining_R: BoolArray  # sequences that have not left since it was made
    undrafted: Undrafted | None = None  # why no request drafts, although one decodes and could


class StepController:
    """Makes the adaptive decisions of one engine.

    Attributes:
        acceptance: predicts which drafts are accepted; None if speculation does not adapt.
        speculating_s, plain_s, undrafted_s: as in `EngineStats`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        maximum = self._max_drafts = config.num_speculative_tokens
        self._config, self._branches = config, config.draft_shape.branches
        self._shaper = DraftShaper(config.draft_shape, maximum)
        # The last ones of online and of background requests.
        self._choices = [DraftChoice(np.zeros(0, np.int32), maximum)] * 2
        self._loads = [StepLoad(1, 0, 0.0)] * 2
        self._weights = RequestWeights(config.num_slots, by_priority=config.by_priority)
        self._adapts_S = np.ones(config.num_slots, dtype=np.bool_)
        self._costs = StepCostModel(config.row_buckets)
        self._policy: DraftLengthPolicy | None = None
        self.acceptance: AcceptanceModel | None = None
        # Predicts for adaptive drafts, or for those that branch.
        self._predictor: AcceptanceModel | None = None
        if maximum > 0 and (config.adaptive_drafts or self._branches):
            self._predictor = AcceptanceModel(maximum, config.num_slots)
        if config.adaptive_drafts:
            self.acceptance = self._predictor
        self._budget = BackgroundBudget(self._costs, config.max_rows, chunks=config.enable_chunked_prefill)
        self._two_batches = TwoBatchOverlap() if config.halves else None
        self._measured_prompt_rows = 0  # the most of a step
        self._ended_s = -math.inf  # time at which the last step ended
        self._restart()

    def _restart(self) -> None:
        if self.acceptance is not None:
            self._policy = DraftLengthPolicy(
                self._max_drafts,
                self._config.max_rows,
                self.acceptance,
                self._costs,
                branches=self._branches,
            )
        self._num_completed = 0
        self._num_unlearned = 0  # steps since the last one learned from
        self._host_s = math.inf  # of the last step
        self.speculating_s = self.plain_s = 0.0
        self.undrafted_s: dict[Undrafted, float] = {}

    @property
    def costs(self) -> StepCostModel | None:
        """Predicts the seconds of steps; None if speculation does not adapt."""
        return None if self._policy is None else self._costs

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """See `AcceptanceModel.calibration_error`; empty if speculation does not adapt."""
        return () if self.acceptance is None else self.acceptance.calibration_error

    @property
    def would_draft(self) -> bool:
        """Whether a single request would get drafts, by present estimates; True while nothing is known."""
        return self._policy is None or not self._costs.has_measured_drafts or self._policy.would_draft()

    def admit(self, slots: list[int], requests: list[Request]) -> None:
        for slot, request in zip(slots, requests, strict=True):
            self._weights.admit(slot, request)
            self._adapts_S[slot] = request.adaptive_drafts
        if self._predictor is not None and slots:
            temperatures = [request.params.temperature for request in requests]
            self._predictor.admit(np.array(slots, np.int32), temperatures)

    def reset(self) -> None:
        """Forget everything, as in a new process."""
        self._forget_drafter()
        if self.acceptance is not None:
            self._costs.reset()
        self._restart()

    def begin_warm_up(self) -> None:
        """Measure steps of every draft length until `end_warm_up`."""
        if self._policy is not None:
            self._policy.begin_warm_up()

    def end_warm_up(self) -> None:
        """Forget all but the step costs, from which the first request starts."""
        self._forget_drafter()
        if self.acceptance is not None:
            self._costs.end_warm_up()
        self._restart()

    def on_drafter_replaced(self) -> None:
        """Forget what was learned about drafts, because the drafter was replaced."""
        self._forget_drafter()
        if self._policy is not None:
            self._policy.on_drafter_replaced()

    def _forget_drafter(self) -> None:
        self._shaper.reset()
        if self._predictor is not None:
            self._predictor.reset()

    def retry_soon(self) -> None:
        """Try drafts in the next step if none are made, because they have become possible again."""
        if self._policy is not None:
            self._policy.retry_soon()

    # Decisions.

    def uses_two_batches(self, num_requests: int) -> bool:
        """Return whether the next step has half of `num_requests` running requests."""
        return self._two_batches is not None and self._two_batches.choose(num_requests)

    def choose_drafts(
        self,
        slots_R: IntArray,
        limits_R: IntArray,
        load: StepLoad,
        now_s: float,
        *,
        background: bool = False,
        is_half: bool = False,
    ) -> IntArray:
        """Return the number of drafts of each of these decoding requests."""
        chain_limits_R = np.minimum(limits_R, self._max_drafts)
        if self._policy is None or not self._adapts_S[slots_R].any():
            choice = DraftChoice(chain_limits_R, self._max_drafts)
        else:
            batch = DecodeBatch(slots_R, chain_limits_R, self._weights.of(slots_R, now_s))
            choice = self._policy.choose(batch, load._replace(is_half=is_half))
        if self._branches:
            choice = self._shaper.shape(choice, limits_R)
        if len(slots_R):
            self._loads[background] = load
        self._choices[background] = choice
        return choice.num_drafts_R

    def last_choice(self, *, background: bool = False) -> DraftChoice:
        return self._choices[background]

    def prefill_rows(self) -> int:
        """Return the maximum prompt rows in a step in which other online requests decode."""
        load = self._loads[False]._replace(prompt_rows=0)
        return self._budget.prompt_rows(load, self._choices[False].length, self._measured_prompt_rows)

    def background_with_online(self, online: tuple[int, int], num_decoding: int) -> BackgroundWork:
        """Return the background work to add to `online` requests that decode: number, draft length."""
        load = StepLoad(online[0], 0, self._loads[False].context)
        return self._budget.with_online(load, online[1], num_decoding)

    def background_without_online(self, num_decoding: int, idle_s: float) -> BackgroundWork:
        """Return the background work of a step `idle_s` after the last one with online requests."""
        load, length = self._loads[True], self._choices[True].length
        each = load.context / load.num_requests
        return self._budget.without_online(num_decoding, length, each, quiet=idle_s > _QUIET_S)

    def on_scheduled(
        self,
        plan: SchedulerOutput,
        context: float,
        now_s: float,
        num_online: int,
        num_running: int,
        *,
        is_half: bool,
        drafter_ready: bool,
    ) -> ScheduledStep:
        """Add shape and trimming to a plan; `num_running` requests of its first kind are running."""
        mode = None if self._two_batches is None else self._two_batches.plan(num_running, is_half=is_half)
        choice = self._choices[not num_online]
        load, weights_R = _load_of(plan, context, is_half), self._weights.of(plan.slots, now_s)
        if load.prompt_rows:
            weights_R = weights_R * plan.samples
        if choice.shape is not None and self._predictor is not None:
            plan = self._shaper.plan(plan, choice, self._predictor, weights_R)
        if self._policy and (trim := self._policy.trim(choice, plan, load, weights_R)) is not None:
            plan = replace(plan, trim=trim)
        remaining_R = np.ones(plan.num_requests, dtype=np.bool_)
        undrafted = None
        if load.num_requests and self._max_drafts and not plan.num_draft_tokens:
            undrafted = _why_undrafted(choice) if drafter_ready else "no_drafter"
        return ScheduledStep(plan, now_s, num_online, choice, load, weights_R, mode, remaining_R, undrafted)

    # Learning.

    def on_completed(
        self,
        step: ScheduledStep,
        outcome: StepOutcome,
        result: StepResult,
        now_s: float,
        *,
        has_background: bool,
    ) -> None:
        """Learn from a completed step; `has_background`: whether background work runs or waits."""
        elapsed_s, self._ended_s = now_s - max(step.planned_s, self._ended_s), now_s
        self._weights.count_tokens(outcome.slots, outcome.num_out, now_s)
        if step.undrafted is not None:
            self.undrafted_s[step.undrafted] = self.undrafted_s.get(step.undrafted, 0.0) + elapsed_s
        if step.choice.shape is not None:
            self._shaper.observe(step.plan, result)
            if self._policy is not None:
                self._policy.observe_shaped(step.choice, step.load, result)
        seconds = result.timings.total_s
        # The host's time between a step's parts is a part of it, except a review's and an idle engine's.
        if 0.0 < elapsed_s - seconds <= _MAX_HOST_SHARE * seconds:
            host_s = elapsed_s - seconds
            if step.choice.is_review:
                host_s = min(host_s, self._host_s)
            seconds, self._host_s = seconds + host_s, host_s
        if seconds > 0.0 and (step.mode is not None or has_background):
            self._learn_shares(step, result, seconds, elapsed_s, has_background=has_background)
        self._num_completed += 1
        self._num_unlearned += 1
        every = UPDATE_STEPS
        if step.choice.length:
            every = min(every, math.ceil(_LEARN_S / ((BETTER - 1.0) * max(seconds, _LEARN_S))))
        is_rare = step.choice.is_trial or step.load.prompt_rows or self._num_completed <= NUM_BLOCKS
        if is_rare or self._num_unlearned >= every:
            self._learn_acceptance(step, outcome, result)
            # A trial represents only itself; any other step also those since the last one learned from.
            num_steps = 1 if step.choice.is_trial or step.load.prompt_rows else self._num_unlearned
            self._learn_costs(step, result, seconds)
            if self._policy is not None and not step.load.prompt_rows:
                self._count_worth(self._policy, step, outcome, seconds, num_steps)
            self._num_unlearned -= num_steps

    def _learn_costs(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        """Learn what drafting and the rest of a step take, from one that took `seconds`."""
        plan, draft_s = step.plan, result.timings.draft_s
        if not step.load.prompt_rows:  # without drafts the drafter's context need not be written
            draft_s += result.timings.inject_s
        num_drafting = int(np.count_nonzero(plan.num_drafts))
        # Seconds of choosing which drafts to verify, which plain steps do not have.
        shape_s = TRIM_S if plan.is_trimmed_by_host else 0.0
        if step.choice.shape is not None:
            shape_s = self._shaper.grow_s(result)
        self._costs.observe(
            step.load,
            _num_verified(plan, result),
            # Rows of the drafter's pass: a block has a request's anchor and its drafts.
            0 if result.is_pass_skipped else int(plan.block_drafts.sum()) + num_drafting,
            draft_s,
            seconds - draft_s - shape_s,
            num_drafting,
            is_change=step.choice.is_change,
        )
        self._measured_prompt_rows = max(self._measured_prompt_rows, int(step.load.prompt_rows))

    def _count_worth(
        self,
        policy: DraftLengthPolicy,
        step: ScheduledStep,
        outcome: StepOutcome,
        seconds: float,
        num_steps: int,
    ) -> None:
        """Compare a step of decoding requests with a plain one, for the loss budget and the speed-up.

        The step took `seconds`; it is counted as `num_steps` steps.
        """
        num_out_R, weights_R = outcome.num_out, step.weights_R[step.remaining_R]
        own_worth, worth = float(step.weights_R.sum()), float(weights_R.dot(num_out_R))
        policy.update_budget(step.choice, own_worth, worth, seconds, num_steps)
        if step.choice.plain_s and len(num_out_R):
            # A plain step would give each request one token in `plain_s`.
            self.speculating_s += num_steps * seconds
            self.plain_s += num_steps * int(num_out_R.sum()) / len(num_out_R) * step.choice.plain_s

    def _learn_acceptance(self, step: ScheduledStep, outcome: StepOutcome, result: StepResult) -> None:
        drafting = np.flatnonzero(outcome.num_planned)
        if self._predictor is None or not len(drafting):
            return
        margins_RK = result.margins
        if self._policy is not None:
            self._policy.reports_margins = margins_RK is not None
        if margins_RK is not None:
            margins_RK = margins_RK[step.remaining_R][drafting]
        num_drafts_R, num_accepted_R = outcome.num_drafts, outcome.num_accepted
        if step.choice.shape is not None:
            counts = num_drafts_R, num_accepted_R
            num_drafts_R, num_accepted_R = self._shaper.main_path(result, step.remaining_R, *counts)
        self._predictor.observe(
            outcome.slots[drafting],
            num_drafts_R[drafting],
            num_accepted_R[drafting],
            ~(outcome.stopped | outcome.full)[drafting],
            outcome.num_planned[drafting],
            margins_RK,
        )

    def _learn_shares(
        self,
        step: ScheduledStep,
        result: StepResult,
        seconds: float,
        elapsed_s: float,
        *,
        has_background: bool,
    ) -> None:
        """Learn about halves and background work from a step in which all of the first kind decode."""
        plan, num_online = step.plan, step.num_online
        count = num_online or plan.num_requests
        drafts_R = plan.num_drafts[:count]
        if not ((plan.num_rows[:count] == drafts_R + 1) & plan.samples[:count]).all():
            return
        # Where drafts were withheld (no drafter, or no context) the time does not belong to the choice. The
        # first estimates of the tokens of drafts are not accurate enough.
        length = int(plan.block_drafts[:count].max())
        is_known = self.acceptance is None or self._num_completed > NUM_BLOCKS // 2
        is_whole = count == plan.num_requests and length == step.choice.length
        if is_whole and is_known and step.mode is not None and self._two_batches is not None:
            num_tokens = step.choice.estimate.worth or float(count)
            self._two_batches.observe(step.mode, num_tokens, elapsed_s, result.timings)
        if has_background and num_online:
            base_s = self._online_s(step, result, length) if count < plan.num_requests else None
            self._budget.observe(seconds if base_s is None else base_s, seconds)

    def _online_s(self, step: ScheduledStep, result: StepResult, length: int) -> float | None:
        """Return the estimated seconds of a step without its background work; None while unknown."""
        if not self._costs.has_measurements:
            return None
        plan, count = step.plan, step.num_online
        online = StepLoad(count, 0, step.load.context * count / plan.num_requests, step.load.is_half)
        non_draft_s = self._costs.non_draft_s(online, _num_verified(plan, result, count))[-1]
        return float(non_draft_s + self._costs.draft_s(online, length)[0])


def _load_of(plan: SchedulerOutput, context: float, is_half: bool) -> StepLoad:
    num_known, num_requests = plan.num_batched_tokens - plan.num_draft_tokens, plan.num_requests
    if num_known == num_requests and plan.samples.all():  # as in most steps
        return StepLoad(num_requests, 0, context, is_half)
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows - plan.num_drafts == 1)))
    return StepLoad(num_decoding, num_known - num_decoding, context, is_half)


def _why_undrafted(choice: DraftChoice) -> Undrafted:
    if choice.length:
        return "not_asked"
    return "plain_is_faster" if choice.estimate.rate > 0.0 and not choice.is_trial else "measuring"


def _num_verified(plan: SchedulerOutput, result: StepResult, count: int | None = None) -> int:
    """Return the verified drafts of a step's first `count` requests, of all by default."""
    return int((plan.num_drafts if result.num_drafts is None else result.num_drafts)[:count].sum())
