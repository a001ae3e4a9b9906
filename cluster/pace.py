"""What is learned of steps as they end, and what follows for the next one: drafts, turns, background work.

The questions are `speculation/policy.py`'s, `halves.py`'s and `background_share.py`'s. Used by `scheduler.py`
alone.

Legend: R requests of a step, online ones first; S slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .background_share import BackgroundShare, Portion
from .halves import Halves, Turn
from .limits import SchedulerConfig
from .outcome import StepOutcome
from .plan import BoolArray, FloatArray, IntArray, SchedulerOutput, StepResult, StepTimings
from .prefill_budget import PrefillBudget
from .request import Request
from .speculation.costs import Costs, Load
from .speculation.policy import Choice, Decoding, Policy
from .speculation.survival import Survival
from .speculation.weights import Weights

_QUIET_S = 5.0  # without online requests: the next one may be far
# Why requests decode without drafts: no drafter, none wanted, plain steps measured, or best.
Undrafted = Literal["no_drafter", "not_asked", "measuring", "plain_is_faster"]
_YOUNG = 64  # steps: so many all tell something
_EACH, _EACH_PLAIN = 2, 16  # so manieth of steps that are all alike is learned from; of plain ones
_EACH_COST, _OLD = 2, 256  # and of those with drafts so manieth tells what it took, after so many steps
_LONG_PLAIN = 128  # steps without drafts: what they take is known
_MOST_OVERHEAD = 0.5  # of a step's own time: what is more is not its own


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is not committed yet.

    Attributes:
        plan: the step.
        planned_s: when it was made.
        num_online: its first requests, which are not background work.
        choice: of the drafts of its first kind of requests.
        load: what it costs besides its drafts.
        weights_R: what a token of each request is worth.
        turn: how it was planned, where there is a choice.
        staying_R: which of its sequences are still those it was made for.
        undrafted: why nobody has drafts, where somebody decodes and could.
    """

    plan: SchedulerOutput
    planned_s: float
    num_online: int
    choice: Choice
    load: Load
    weights_R: FloatArray
    turn: Turn | None
    staying_R: BoolArray
    undrafted: Undrafted | None = None

    @property
    def halved(self) -> bool:
        return self.turn is not None and self.turn.halved


class Pace:
    """Of one engine.

    Attributes:
        speculating_s, plain_s, undrafted_s: as of `EngineStats`.
        survival: how likely drafts are to stand, where that decides.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        most = self._most_drafts = config.num_speculative_tokens
        self._choices = [Choice(np.zeros(0, np.int32), most)] * 2  # the last, of online and of background
        self._weights = Weights(config.num_slots, by_priority=config.by_priority)
        self._config = config
        self._policies: dict[bool, Policy] = {}  # of all requests, and of halves by turns
        self.survival: Survival | None = None
        if config.adaptive_drafts and most > 0:
            self.survival = Survival(most, config.num_slots)
            self._make_policies(self.survival, Costs(config.row_buckets))
        self._share = BackgroundShare(config.max_rows, chunks=config.enable_chunked_prefill)
        # None: a prompt is computed in one step.
        self._prefill = PrefillBudget(config.max_rows) if config.enable_chunked_prefill else None
        self._halves = Halves() if config.halves else None
        self._ended_s = -math.inf  # the last step
        self._num_learned = self._num_plain = 0  # steps that ended; of these the last ones without drafts
        self._num_untold, self._untold_s = 0, 0.0  # steps since one told what it took, it included; seconds
        self._turn = 0
        self.speculating_s = self.plain_s = 0.0
        self.undrafted_s: dict[Undrafted, float] = {}

    def _make_policies(self, survival: Survival, costs: Costs) -> None:
        bounds = self._most_drafts, self._config.max_rows, survival
        whole = self._policies[False] = Policy(*bounds, costs)
        if self._config.halves:
            self._policies[True] = Policy(*bounds, costs.with_other_drafts(), whole)

    @property
    def costs(self) -> Costs | None:
        """What steps cost, where that decides about drafts."""
        return self._policies[False].costs if self._policies else None

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """See `Survival.calibration_error`; empty where nothing is foreseen."""
        return () if self.survival is None else self.survival.calibration_error

    def enter(self, slots: IntArray, requests: list[Request]) -> None:
        """Requests have these slots now."""
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._weights.enter(slot, request)
        if self.survival is not None and len(slots):
            self.survival.enter(slots, [request.params.temperature for request in requests])
            for policy in self._policies.values():
                policy.enter(slots)

    @property
    def pays(self) -> bool:
        """Whether one request would have drafts, by what is known of drafts and costs; also if nothing is."""
        policy = self._policies.get(False)
        return policy is None or not policy.costs.know_drafts or policy.pays()

    def forget(self, *, costs: bool) -> None:
        """Forget what was learned of drafts, and of the costs of steps if so asked; and all sums."""
        if self.survival is not None:
            self.survival.renew()
            self._make_policies(self.survival, self._policies[False].costs)
            if costs:
                self._policies[False].costs.forget()
        self._num_learned = self._num_plain = 0
        self._num_untold, self._untold_s = 0, 0.0
        self.speculating_s = self.plain_s = 0.0
        self.undrafted_s.clear()

    def renew_drafter(self) -> None:
        """There is another one."""
        if self.survival is not None:
            self.survival.renew()
        for policy in self._policies.values():
            policy.renew()

    def in_halves(self, num_requests: int) -> bool:
        """Whether the next step of so many running requests is to have half of them."""
        return self._halves is not None and self._halves.choose(num_requests)

    def drafts(
        self,
        slots_R: IntArray,
        limits_R: IntArray,
        load: Load,
        now_s: float,
        *,
        background: bool = False,
        halved: bool = False,
    ) -> IntArray:
        """Drafts of each of these requests that decode, the half of those that run or all."""
        policy = self._policies.get(halved)
        if policy is None or not len(slots_R):
            choice = Choice(np.minimum(limits_R, self._most_drafts), self._most_drafts)
        else:
            weights_R = self._weights.of(slots_R, now_s)
            choice = policy.choose(Decoding(slots_R, limits_R, weights_R), load)
        self._choices[background] = choice
        return choice.num_drafts_R

    def try_soon(self) -> None:
        """Drafts can be made again: whoever makes none tries it, as soon as it may."""
        for policy in self._policies.values():
            policy.try_soon()

    def last_choice(self, *, background: bool = False) -> Choice:
        return self._choices[background]

    def last_drafts(self, *, background: bool = False) -> int:
        """How long the blocks were that were chosen the last time."""
        return self._choices[background].length

    def prefill_rows(self) -> int:
        """Return the most rows of prompts in a step in which other online requests decode."""
        return self._config.max_rows if self._prefill is None else self._prefill.rows()

    def beside(self, online: tuple[int, int], num_decoding: int) -> Portion:
        """Background work of a step in which so many online requests decode, with blocks of so many drafts.

        Args:
            num_decoding: background requests that could.
        """
        return self._share.beside(*online, num_decoding)

    def alone(self, num_decoding: int, idle_s: float) -> Portion:
        """Background work of a step that holds nothing else.

        Args:
            num_decoding: background requests that could.
            idle_s: since the last step with online requests.
        """
        return self._share.alone(num_decoding, 1 + self.last_drafts(background=True), quiet=idle_s > _QUIET_S)

    def depart(
        self,
        plan: SchedulerOutput,
        context: float,
        now_s: float,
        num_online: int,
        num_running: int,
        *,
        halved: bool,
        drafter_ready: bool,
    ) -> Flight:
        """A plan was made while so many requests of its first kind ran; it may be trimmed now.

        Args:
            context: tokens that its requests look back on, together.
        """
        turn = None if self._halves is None else self._halves.plan(num_running, halved=halved)
        choice = self._choices[not num_online]
        load, weights_R = _load_of(plan, context), self._weights.of(plan.slots, now_s)
        if load.prompt_rows:
            weights_R = weights_R * plan.samples
        policy = self._policies.get(halved)
        if policy is not None and (trim := policy.trim(choice, plan, load, weights_R)) is not None:
            plan = replace(plan, trim=trim)
        staying_R = np.ones(plan.num_requests, dtype=np.bool_)
        undrafted = None
        if load.num_rows and self._most_drafts and not plan.num_draft_tokens:
            undrafted = _why_undrafted(choice) if drafter_ready else "no_drafter"
        return Flight(plan, now_s, num_online, choice, load, weights_R, turn, staying_R, undrafted)

    # A step has ended.

    def learn(
        self, flight: Flight, outcome: StepOutcome, result: StepResult, now_s: float, *, shares: bool
    ) -> None:
        """A step has ended; `shares` says whether there is background work at all."""
        elapsed_s, self._ended_s = now_s - max(flight.planned_s, self._ended_s), now_s
        self._weights.came(outcome.slots, outcome.num_out, now_s)
        self._num_learned += 1
        self._num_plain = 0 if flight.choice.length else self._num_plain + 1
        if flight.undrafted is not None:
            self.undrafted_s[flight.undrafted] = self.undrafted_s.get(flight.undrafted, 0.0) + elapsed_s
        self._num_untold, self._untold_s = self._num_untold + 1, self._untold_s + result.timings.total_s
        if self._tells_enough(flight):
            self._learn_acceptance(flight, outcome, result)
            if self._tells_costs(flight.choice):
                self._learn_costs(flight, outcome, result, elapsed_s)
                self._num_untold, self._untold_s = 0, 0.0
        if self._prefill is not None:
            self._prefill.learn(flight.load.prompt_rows, result.timings.total_s)
        if self._halves is None and not shares:
            return
        plan, num_online, timings = flight.plan, flight.num_online, result.timings
        count = num_online or plan.num_requests
        num_drafts = _decoding_drafts(plan, count)
        if count < plan.num_requests:
            if num_drafts is not None:
                portion = _portion_of(plan, num_online)
                self._share.learn_joined(num_online, num_drafts, portion, timings.total_s)
            return
        # Where drafts were withheld (no drafter, or no context) the time is not that of what was chosen.
        as_chosen = num_drafts == flight.choice.length and self._knows_drafts
        if as_chosen and flight.turn is not None and self._halves is not None:
            num_tokens = flight.choice.worth or float(count)
            self._halves.learn(flight.turn, num_tokens, elapsed_s, timings)
        if not num_online:
            self._share.learn_alone(plan.num_batched_tokens, timings.total_s)
        elif num_drafts is not None and shares:
            self._share.learn_online(count, num_drafts, timings.total_s)

    @property
    def _knows_drafts(self) -> bool:
        """Whether it is known what drafts bring, as far as that was foreseen."""
        return self.survival is None or self._num_learned > _YOUNG // 2

    def _tells_enough(self, flight: Flight) -> bool:
        """Of steps that are all alike some are enough: to learn takes time, too."""
        choice = flight.choice
        settled = choice.rate > 0.0 and not choice.trial and self._num_learned > _YOUNG
        each = _EACH_PLAIN if self._num_plain > _LONG_PLAIN else _EACH
        return not settled or self._num_learned % each == 0

    def _tells_costs(self, choice: Choice) -> bool:
        self._turn = (self._turn + 1) % _EACH_COST
        return not self._turn or not choice.length or choice.trial or self._num_learned < _OLD

    def _learn_costs(
        self, flight: Flight, outcome: StepOutcome, result: StepResult, elapsed_s: float
    ) -> None:
        policy = self._policies.get(flight.halved)
        if policy is None:
            return
        plan, timings = flight.plan, result.timings
        draft_rows = plan.num_draft_tokens
        num_drafts = num_drafting = 0
        if draft_rows:
            num_drafts = draft_rows if result.num_drafts is None else int(result.num_drafts.sum())
            num_drafting = int(np.count_nonzero(plan.num_drafts))
        draft_rows += num_drafting
        rest_s = timings.total_s - timings.draft_s + _overhead_s(timings, elapsed_s)
        policy.learn(
            *(flight.load, num_drafts, draft_rows, timings.draft_s, rest_s),
            num_drafting=num_drafting,
            cuts=plan.trim is not None,
            num_alike=self._num_untold,
        )
        if not flight.load.prompt_rows:
            self._pay(policy, flight, outcome, timings.draft_s + rest_s)

    def _pay(self, policy: Policy, flight: Flight, outcome: StepOutcome, seconds: float) -> None:
        """Weigh a step in which all decode against plain ones."""
        weights_R, num_out_R = flight.weights_R, outcome.num_out
        if len(num_out_R) < len(weights_R):
            weights_R = weights_R[flight.staying_R]
        own_worth = float(weights_R.sum())
        policy.pay(flight.choice, own_worth, float(weights_R.dot(num_out_R)), seconds, self._untold_s)
        if flight.choice.plain_s and len(num_out_R):
            count = self._num_untold  # for which this one stands
            self.speculating_s += count * seconds
            self.plain_s += count * int(num_out_R.sum()) / len(num_out_R) * flight.choice.plain_s

    def _learn_acceptance(self, flight: Flight, outcome: StepOutcome, result: StepResult) -> None:
        drafted_R, margins_RK = outcome.num_planned, result.margins
        num_drafting = int(np.count_nonzero(drafted_R))
        if self.survival is None or not num_drafting:
            return
        for policy in self._policies.values():
            policy.tells_margins = margins_RK is not None
        if margins_RK is not None and len(margins_RK) > len(drafted_R):
            margins_RK = margins_RK[flight.staying_R]
        slots_R, verified_R, accepted_R = outcome.slots, outcome.num_drafts, outcome.num_accepted
        goes_on_R: BoolArray = ~(outcome.stopped | outcome.full)
        if num_drafting < len(drafted_R):
            drafting = np.flatnonzero(drafted_R)
            drafted_R = drafted_R[drafting]
            slots_R, verified_R, accepted_R = slots_R[drafting], verified_R[drafting], accepted_R[drafting]
            goes_on_R = goes_on_R[drafting]
            margins_RK = None if margins_RK is None else margins_RK[drafting]
        self.survival.learn(slots_R, verified_R, accepted_R, goes_on_R, drafted_R, margins_RK)


def _load_of(plan: SchedulerOutput, context: float) -> Load:
    """What a plan's requests bring beside drafts."""
    num_known, num_requests = plan.num_batched_tokens - plan.num_draft_tokens, plan.num_requests
    if num_known == num_requests and plan.samples.all():  # as in most steps
        return Load(num_requests, 0, context)
    num_decoding = int(np.count_nonzero(plan.samples & (plan.num_rows - plan.num_drafts == 1)))
    return Load(num_decoding, num_known - num_decoding, context)


def _why_undrafted(choice: Choice) -> Undrafted:
    if choice.length:
        return "not_asked"
    return "plain_is_faster" if choice.rate > 0.0 and not choice.trial else "measuring"


def _overhead_s(timings: StepTimings, elapsed_s: float) -> float:
    """What a step takes beside its parts, if that is its own."""
    overhead_s = elapsed_s - timings.total_s
    return overhead_s if 0.0 < overhead_s <= _MOST_OVERHEAD * timings.total_s else 0.0


def _decoding_drafts(plan: SchedulerOutput, count: int) -> int | None:
    """Most drafts of each of a plan's first requests, if all decode."""
    decode = (plan.num_rows[:count] == plan.num_drafts[:count] + 1).all() and plan.samples[:count].all()
    return int(plan.num_drafts[:count].max()) if decode else None


def _portion_of(plan: SchedulerOutput, num_online: int) -> Portion:
    """The background work that a step had."""
    drafts_B, rows_B = plan.num_drafts[num_online:], plan.num_rows[num_online:]
    decodes_B = plan.samples[num_online:] & (rows_B == drafts_B + 1)
    return Portion(int(decodes_B.sum()), int(rows_B[~decodes_B].sum()))
