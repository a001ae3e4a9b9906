"""Chooses drafts, batch halves, background work and prompt rows of each step, and learns from completed
steps.

The decisions are made by `speculation/draft_length_policy.py`, `batch_halves.py`, `background_budget.py` and
`prefill_budget.py`; this class is their common interface to the scheduler, the only caller.

Legend: R requests of a step, online ones first; K most drafts of a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..request.request import Request
from ..speculation.acceptance_model import AcceptanceModel
from ..speculation.draft_length_policy import DecodeBatch, DraftChoice, DraftLengthPolicy
from ..speculation.request_weights import RequestWeights
from ..speculation.step_cost_model import StepCostModel, StepLoad
from ..step.limits import SchedulerConfig
from ..step.scheduler_output import BoolArray, FloatArray, IntArray, SchedulerOutput, StepResult, StepTimings
from ..step.step_outcome import StepOutcome
from .background_budget import BackgroundBudget, BackgroundWork
from .batch_halves import BatchHalves, BatchMode
from .prefill_budget import PrefillBudget

_QUIET_S = 5.0  # without online requests, after which background steps may be longer
# Why requests decode without drafts: no drafter, not allowed for them, plain steps are measured, or are
# faster.
Undrafted = Literal["no_drafter", "not_asked", "measuring", "plain_is_faster"]
_FIRST_STEPS = 64  # initial steps, all of which are learned from
# Later every second drafting step is learned from, and every 16th plain one, since learning takes host time.
_LEARN_EVERY, _LEARN_EVERY_PLAIN = 2, 16
_MAX_HOST_SHARE = 0.5  # of a step's own seconds; more time between steps was spent idle


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan that is not committed yet.

    Attributes:
        plan: the step.
        planned_s: time at which it was made.
        num_online: number of its first requests, which are not background work.
        choice: draft choice for its first kind of requests.
        load: what it computes besides drafts.
        weights_R: weight of each request.
        turn: how it was planned, if halves are possible.
        staying_R: mask of the sequences that have not left since it was made.
        undrafted: why no request drafts, although one decodes and could.
    """

    plan: SchedulerOutput
    planned_s: float
    num_online: int
    choice: DraftChoice
    load: StepLoad
    weights_R: FloatArray
    turn: BatchMode | None
    staying_R: BoolArray
    undrafted: Undrafted | None = None

    @property
    def is_half(self) -> bool:
        return self.turn is not None and self.turn.is_half


class StepController:
    """The adaptive decisions of one engine.

    Attributes:
        acceptance: predicts which drafts are accepted; None if speculation does not adapt.
        speculating_s, plain_s, undrafted_s: as in `EngineStats`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        most = self._max_drafts = config.num_speculative_tokens
        self._choices = [DraftChoice(np.zeros(0, np.int32), most)] * 2  # last ones for online, background
        self._weights = RequestWeights(config.num_slots, by_priority=config.by_priority)
        self._config = config
        self._policies: dict[bool, DraftLengthPolicy] = {}  # for whole batches, and for halves
        self.acceptance: AcceptanceModel | None = None
        if config.adaptive_drafts and most > 0:
            self.acceptance = AcceptanceModel(most, config.num_slots)
            self._make_policies(self.acceptance, StepCostModel(config.row_buckets))
        self._background = BackgroundBudget(config.max_rows, chunks=config.enable_chunked_prefill)
        # None: a prompt is computed in one step.
        self._prefill = PrefillBudget(config.max_rows) if config.enable_chunked_prefill else None
        self._halves = BatchHalves() if config.halves else None
        self._ended_s = -math.inf  # time at which the last step ended
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._num_completed = 0
        self._num_unlearned = 0  # steps since the last one learned from
        self.speculating_s = self.plain_s = 0.0
        self.undrafted_s: dict[Undrafted, float] = {}

    def _make_policies(self, acceptance: AcceptanceModel, costs: StepCostModel) -> None:
        bounds = self._max_drafts, self._config.max_rows, acceptance
        whole = self._policies[False] = DraftLengthPolicy(*bounds, costs)
        if self._config.halves:
            self._policies[True] = DraftLengthPolicy(*bounds, costs.with_other_drafts(), whole)

    @property
    def costs(self) -> StepCostModel | None:
        """Predicts the seconds of steps; None if speculation does not adapt."""
        return self._policies[False].costs if self._policies else None

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """See `AcceptanceModel.calibration_error`; empty if speculation does not adapt."""
        return () if self.acceptance is None else self.acceptance.calibration_error

    @property
    def pays(self) -> bool:
        """Whether a single request would get drafts, by present estimates; True while nothing is known."""
        policy = self._policies.get(False)
        return policy is None or not policy.costs.has_measured_drafts or policy.pays()

    def admit(self, slots: IntArray, requests: list[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._weights.admit(slot, request)
        if self.acceptance is not None and len(slots):
            self.acceptance.admit(slots, [request.params.temperature for request in requests])

    def forget(self, *, costs: bool) -> None:
        """Forget what was learned about drafts, all sums, and with `costs` also the step costs."""
        if self.acceptance is not None:
            self.acceptance.reset()
            self._make_policies(self.acceptance, self._policies[False].costs)
            if costs:
                self._policies[False].costs.reset()
        self._reset_sums()

    def replace_drafter(self) -> None:
        """Forget what was learned about drafts, because the drafter was replaced."""
        if self.acceptance is not None:
            self.acceptance.reset()
        for policy in self._policies.values():
            policy.replace_drafter()

    def retry_soon(self) -> None:
        """Try drafts in the next step if none are made, because they have become possible again."""
        for policy in self._policies.values():
            policy.retry_soon()

    # Decisions.

    def uses_halves(self, num_requests: int) -> bool:
        """Return whether the next step has half of `num_requests` running requests."""
        return self._halves is not None and self._halves.choose(num_requests)

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
        policy = self._policies.get(is_half)
        if policy is None or not len(slots_R):
            choice = DraftChoice(np.minimum(limits_R, self._max_drafts), self._max_drafts)
        else:
            weights_R = self._weights.of(slots_R, now_s)
            choice = policy.choose(DecodeBatch(slots_R, limits_R, weights_R), load)
        self._choices[background] = choice
        return choice.num_drafts_R

    def last_choice(self, *, background: bool = False) -> DraftChoice:
        return self._choices[background]

    def prefill_rows(self) -> int:
        """Return the maximum prompt rows in a step in which other online requests decode."""
        return self._config.max_rows if self._prefill is None else self._prefill.rows()

    def background_beside(self, online: tuple[int, int], num_decoding: int) -> BackgroundWork:
        """Return the background work of a step with online requests.

        Args:
            online: number of decoding online requests, and their draft length.
            num_decoding: background requests that could decode.
        """
        return self._background.beside(*online, num_decoding)

    def background_alone(self, num_decoding: int, idle_s: float) -> BackgroundWork:
        """Return the background work of a step without online requests.

        Args:
            num_decoding: background requests that could decode.
            idle_s: seconds since the last step with online requests.
        """
        rows_each = 1 + self._choices[True].length
        return self._background.alone(num_decoding, rows_each, quiet=idle_s > _QUIET_S)

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
        """Complete a plan with how its drafts are trimmed.

        Args:
            context: context tokens, summed over its requests.
            num_online: number of its first requests, which are not background work.
            num_running: running requests of its first kind.
        """
        turn = None if self._halves is None else self._halves.plan(num_running, is_half=is_half)
        choice = self._choices[not num_online]
        load, weights_R = _load_of(plan, context), self._weights.of(plan.slots, now_s)
        if load.prompt_rows:
            weights_R = weights_R * plan.samples
        policy = self._policies.get(is_half)
        if policy is not None and (trim := policy.trim(choice, plan, load, weights_R)) is not None:
            plan = replace(plan, trim=trim)
        staying_R = np.ones(plan.num_requests, dtype=np.bool_)
        undrafted = None
        if load.num_requests and self._max_drafts and not plan.num_draft_tokens:
            undrafted = _why_undrafted(choice) if drafter_ready else "no_drafter"
        return ScheduledStep(plan, now_s, num_online, choice, load, weights_R, turn, staying_R, undrafted)

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
        """Learn from a completed step; `has_background`: there is background work, in it or waiting."""
        elapsed_s, self._ended_s = now_s - max(step.planned_s, self._ended_s), now_s
        total_s = result.timings.total_s
        self._weights.count_tokens(outcome.slots, outcome.num_out, now_s)
        if step.undrafted is not None:
            self.undrafted_s[step.undrafted] = self.undrafted_s.get(step.undrafted, 0.0) + elapsed_s
        self._num_completed += 1
        self._num_unlearned += 1
        if self._is_learned_from(step):
            self._learn_acceptance(step, outcome, result)
            # A trial represents only itself; any other step also those since the last one learned from.
            num_steps = 1 if step.choice.is_trial else self._num_unlearned
            self._learn_costs(step, outcome, result, elapsed_s, num_steps)
            self._num_unlearned -= num_steps
        if self._prefill is not None:
            self._prefill.learn(step.load.prompt_rows, total_s)
        if has_background or self._halves is not None:
            self._learn_shares(step, result.timings, elapsed_s, has_background=has_background)

    def _is_learned_from(self, step: ScheduledStep) -> bool:
        every = _LEARN_EVERY if step.choice.length else _LEARN_EVERY_PLAIN
        is_young = step.choice.is_trial or self._num_completed <= _FIRST_STEPS
        return is_young or self._num_unlearned >= every

    def _learn_costs(
        self, step: ScheduledStep, outcome: StepOutcome, result: StepResult, elapsed_s: float, num_steps: int
    ) -> None:
        if (policy := self._policies.get(step.is_half)) is None:
            return
        plan, timings = step.plan, result.timings
        num_drafts = plan.num_draft_tokens
        num_drafting = int(np.count_nonzero(plan.num_drafts)) if num_drafts else 0
        draft_rows = num_drafts + num_drafting
        if num_drafts and result.num_drafts is not None:
            num_drafts = int(result.num_drafts.sum())
        seconds = timings.total_s + _host_s(timings, elapsed_s)
        rest_s = seconds - timings.draft_s
        policy.observe(step.load, num_drafts, draft_rows, timings.draft_s, rest_s, num_drafting)
        if step.load.prompt_rows:
            return
        weights_R, num_out_R = step.weights_R, outcome.num_out
        if len(num_out_R) < len(weights_R):
            weights_R = weights_R[step.staying_R]
        worth = float(weights_R.dot(num_out_R))
        policy.account(step.choice, float(weights_R.sum()), worth, seconds, num_steps)
        if step.choice.plain_s and len(num_out_R):
            self.speculating_s += num_steps * seconds
            self.plain_s += num_steps * int(num_out_R.sum()) / len(num_out_R) * step.choice.plain_s

    def _learn_acceptance(self, step: ScheduledStep, outcome: StepOutcome, result: StepResult) -> None:
        drafting = np.flatnonzero(outcome.num_planned)
        if self.acceptance is None or not len(drafting):
            return
        margins_RK = result.margins
        for policy in self._policies.values():
            policy.reports_margins = margins_RK is not None
        if margins_RK is not None:
            margins_RK = margins_RK[step.staying_R][drafting]
        continues_R: BoolArray = ~(outcome.stopped | outcome.full)
        self.acceptance.observe(
            outcome.slots[drafting],
            outcome.num_drafts[drafting],
            outcome.num_accepted[drafting],
            continues_R[drafting],
            outcome.num_planned[drafting],
            margins_RK,
        )

    def _learn_shares(
        self, step: ScheduledStep, timings: StepTimings, elapsed_s: float, *, has_background: bool
    ) -> None:
        plan, num_online = step.plan, step.num_online
        count = num_online or plan.num_requests
        num_drafts = _draft_length(plan, count)
        if count < plan.num_requests:
            if num_drafts is not None:
                self._background.observe_joined(
                    num_online, num_drafts, _portion_of(plan, num_online), timings.total_s
                )
            return
        # Where drafts were withheld (no drafter, or no context) the time does not belong to the choice. The
        # first estimates of the tokens of drafts are not accurate enough.
        is_known = self.acceptance is None or self._num_completed > _FIRST_STEPS // 2
        if (
            num_drafts == step.choice.length
            and is_known
            and step.turn is not None
            and self._halves is not None
        ):
            num_tokens = step.choice.worth or float(count)
            self._halves.observe(step.turn, num_tokens, elapsed_s, timings)
        if not num_online:
            self._background.observe_alone(plan.num_batched_tokens, timings.total_s)
        elif num_drafts is not None and has_background:
            self._background.observe_online(count, num_drafts, timings.total_s)


def _load_of(plan: SchedulerOutput, context: float) -> StepLoad:
    num_known, num_requests = plan.num_batched_tokens - plan.num_draft_tokens, plan.num_requests
    if num_known == num_requests and plan.samples.all():  # as in most steps
        return StepLoad(num_requests, 0, context)
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows - plan.num_drafts == 1)))
    return StepLoad(num_decoding, num_known - num_decoding, context)


def _why_undrafted(choice: DraftChoice) -> Undrafted:
    if choice.length:
        return "not_asked"
    return "plain_is_faster" if choice.rate > 0.0 and not choice.is_trial else "measuring"


def _host_s(timings: StepTimings, elapsed_s: float) -> float:
    """Return the host's seconds between a step's parts, or 0 if so many that the engine was idle."""
    host_s = elapsed_s - timings.total_s
    return host_s if 0.0 < host_s <= _MAX_HOST_SHARE * timings.total_s else 0.0


def _draft_length(plan: SchedulerOutput, count: int) -> int | None:
    """Return the largest number of drafts of a plan's first requests; None unless all of these decode."""
    decode = (plan.num_rows[:count] == plan.num_drafts[:count] + 1).all() and plan.samples[:count].all()
    return int(plan.num_drafts[:count].max()) if decode else None


def _portion_of(plan: SchedulerOutput, num_online: int) -> BackgroundWork:
    """Return the background work that a step had."""
    drafts_B, rows_B = plan.num_drafts[num_online:], plan.num_rows[num_online:]
    decodes_B = plan.samples[num_online:] & (rows_B == drafts_B + 1)
    return BackgroundWork(int(decodes_B.sum()), int(rows_B[~decodes_B].sum()))
