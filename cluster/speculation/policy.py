"""How many drafts: who drafts, how long the blocks are, and how they are cut; as brings most per second.

Each step is planned with a *length* (of the ladder, 0 is plain decoding) and with a rule by which its drafts
are cut once their margins are known (`choice.py`). The length is the one of the best outlook (`review.py`),
by what drafts were likely to bring lately (`survival.py`) and what steps cost (`costs.py`). Requests whose
drafts are not worth the drafter's rows have none, but now and then, so that it is noticed when that changes.

To decide takes time, too. So a plan stands until it is reviewed: every few steps when little is known, then
every two hundred; sooner where the number of requests has changed by much. In between a step's choice is a
few look-ups, and the cut is the last step's as long as requests and what is known of them are the same.

What is not known must be tried, and no trial may make anybody slower than plain decoding for long: what
speculation may lose is bounded (`budget.py`), by trials as by drafts in earnest that fail.

* A trial is made where the best that its costs can be would pay, first where most is to be won for what it
  may cost. What is learned holds for all loads, for costs are of rows.
* Where drafting is off it is tried all the same, for texts change: the seldomer the more often it has failed.
* A length is left for another that is much better, or better twice in a row: estimates have noise.

No token depends on it. Where nothing is measured (simulated executors without a clock) all drafts are made.
Knows no sequences; used by `pace.py` alone.

Legend: R requests that decode, K most drafts, S drafts that are verified, N rows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..plan import BoolArray, FloatArray, IntArray, SchedulerOutput, Trim
from .budget import Budget
from .costs import Costs, Load
from .ladder import draft_ladder, load_of
from .review import Decoding, Review
from .survival import Survival
from .way import MUCH_BETTER, Way

__all__ = ["Choice", "Decoding", "Policy"]

_BETTER = 1.01  # than the length there is, twice in a row; or once, if it is much better
_WORTH_TRYING = 0.02  # of what is brought now, more in the best case
_UNKNOWN = 2.5  # plain steps are known whose bounds are nearer than this
_REVIEW_YOUNG, _REVIEW_DOUBTFUL, _REVIEW = 8, 48, 192  # steps
_REVIEWS_OF_ALL = 4  # the first ones, and then each so manieth, look at all lengths
_SAME = 1  # loads (of `load_of`) that one plan serves: requests come and go
_NEAR, _PATIENCE = 3, 16  # loads that one serves for so many steps
_RETRY, _RETRY_MOST = 64, 1024  # steps without drafts, then some are made
_TELLING = 3  # drafts of a request that tell of its text: one that falls tells nothing of those behind it
_DECLINED_EVERY = 64  # steps, then a request that does not draft does
_TRIED, _TRIED_STEPS = 4, 3  # requests of a trial in all, and steps
_LEAST_LOSS = 0.01  # of a plain step: what may be lost is never nothing
_SAMPLED = 64  # requests that stand for all
_USUAL_CONTEXT = 256.0  # tokens


class Choice(NamedTuple):
    """For one step.

    Attributes:
        num_drafts_R: of each request, as far as its limit allows.
        length: of the blocks.
        trial: whether it is made to learn something: then all drafts are verified.
        rate, worth: what the best way brings per second, and this one in the step; 0 where that is not known.
        plain_s: what a step without drafts would take; 0 where that is not known.
        cuts: whether drafts are cut once their margins are known.
    """

    num_drafts_R: IntArray
    length: int
    trial: bool = False
    rate: float = 0.0
    worth: float = 0.0
    plain_s: float = 0.0
    cuts: bool = True


class Policy:
    """Of one engine, for one way of planning its steps.

    Args:
        most: drafts per request at most (K).
        max_rows: of a step.
        survival: of the drafter.
        costs: of steps that are planned in this way.
        like: of another way, which this one begins as.
    """

    def __init__(
        self, most: int, max_rows: int, survival: Survival, costs: Costs, like: Policy | None = None
    ) -> None:
        self._most, self._max_rows = most, max_rows
        self._survival, self.costs = survival, costs
        self._ladder = draft_ladder(most)
        self._ways: dict[int, Way] = {}
        self._like = like
        self._last_load = -_SAME - 1
        self._num_ended = self._num_steps = 0
        self._budget = Budget()
        self._idle, self._retry_after = 0, _RETRY  # steps without drafts, and after how many they are tried
        self._rests_until = 0
        self._declines_S = np.zeros(survival.num_slots, dtype=np.bool_)
        self._any_declines = False
        self.tells_margins = True
        self._last_trim: tuple[object, FloatArray, Trim] | None = None  # by what it was made
        self._last_cut: tuple[object, IntArray] | None = None

    def renew(self) -> None:
        """There is another drafter."""
        self._retry_after, self._rests_until = _RETRY, 0
        self._declines_S[:] = False
        for way in self._ways.values():
            way.review_at = 0

    def enter(self, slots: IntArray) -> None:
        """These slots have new requests: none of them has declined."""
        self._declines_S[slots] = False

    def try_soon(self) -> None:
        """Where no drafts are made they are to be tried in the next step, if the budget allows it."""
        self._idle = max(self._idle, self._retry_after)
        for way in self._ways.values():
            way.review_at = 0

    def pays(self) -> bool:
        """Return whether one request would have drafts, by what is known of drafts and costs."""
        who = Decoding(np.zeros(1, np.int32), np.array([self._most], np.int32), np.ones(1, np.float32))
        lengths = [length for length in self._ladder if length < self._max_rows]
        review = Review(who, Load(1, 0, _USUAL_CONTEXT), self._survival, self.costs, lengths)
        return max(outlook.rate for outlook in review.outlooks.values()) > _BETTER * review.outlooks[0].rate

    # A step is planned.

    def choose(self, who: Decoding, load: Load) -> Choice:
        """For these requests, in a step of such a load."""
        if not self.costs.know_time:
            return self._choice(who, self._most if self._num_ended else 0)
        way = self._way(len(who.slots_R))
        way.steps += 1
        self._num_steps += 1
        if not way.trial[1] and way.steps >= way.review_at and who.limits_R.any():
            self._review(way, who, load)
        length, left = way.trial
        if left:
            way.trial, way.review_at, self._idle = (length, left - 1), way.steps + 1, 0
            return self._choice(who, length, way, trial=True)
        self._idle = 0 if way.length else self._idle + 1
        choice = self._choice(who, way.length, way)
        return self._cut_beforehand(way, who, load, choice) if way.length else choice

    def _way(self, num_requests: int) -> Way:
        """To begin with, what is best for the most similar number; what is not near is reviewed at once."""
        load = load_of(num_requests)
        if abs(load - self._last_load) <= _SAME:
            load = self._last_load
        self._last_load = load
        if (way := self._ways.get(load)) is not None:
            return way
        ways = self._ways or (self._like._ways if self._like else {})
        nearest = min(ways, key=lambda other: abs(other - load), default=None)
        way = Way()
        if nearest is not None:
            old = ways[nearest]
            wait = _PATIENCE if abs(nearest - load) <= _NEAR and old.rate else 0
            steps = old.steps // 2
            way = replace(old, steps=steps, review_at=steps + wait, trial=(0, 0), tried={})
        self._ways[load] = way
        return way

    def _choice(self, who: Decoding, length: int, way: Way | None = None, *, trial: bool = False) -> Choice:
        drafts_R = np.minimum(who.limits_R, length)
        if way is None:
            return Choice(drafts_R, length, trial)
        return Choice(drafts_R, length, trial, way.rate, way.worth, way.plain_s, way.cuts and not trial)

    def _cut_beforehand(self, way: Way, who: Decoding, load: Load, choice: Choice) -> Choice:
        """Take the drafts of those that have declined; and where no margins will be told, of all what is not
        expected to pay."""
        drafts_R = choice.num_drafts_R
        if self._any_declines:
            turn_R = (way.steps + 7 * who.slots_R) % _DECLINED_EVERY == 0
            drafts_R = np.where(self._declines_S[who.slots_R] & ~turn_R, 0, drafts_R)
        if not self.tells_margins:
            drafts_R = np.minimum(drafts_R, self._expected_to_pay(who, load, choice))
        return choice if drafts_R is choice.num_drafts_R else choice._replace(num_drafts_R=drafts_R)

    def _expected_to_pay(self, who: Decoding, load: Load, choice: Choice) -> IntArray:
        """Drafts of each request, by what is expected of them."""
        told = (
            who.slots_R.tobytes(),
            who.weights_R.tobytes(),
            self._survival.version,
            choice.length,
            choice.rate,
        )
        if self._last_cut is None or self._last_cut[0] != told:
            worths_RK = self._survival.means(who.slots_R)[:, : choice.length] * who.weights_R[:, None]
            seconds_S = self.costs.rest_s(load, worths_RK.size)
            falling_S = -np.sort(-worths_RK, axis=None)
            gains_S = np.cumsum(falling_S) - choice.rate * (seconds_S[1:] - seconds_S[0])
            least = falling_S[np.argmax(gains_S)] if gains_S.max() > 0.0 else np.inf
            self._last_cut = told, np.count_nonzero(worths_RK >= least, axis=1).astype(np.int32)
        return self._last_cut[1]

    # What is best is looked for.

    def _review(self, way: Way, who: Decoding, load: Load) -> None:
        """Settle the best length, and whether another is to be tried."""
        way.review_at = way.steps + min(max(way.steps // 2, _REVIEW_YOUNG), _REVIEW)
        self._survival.settle()
        self.costs.settle()
        least, most = self.costs.bounds_s(load, (0,))
        if most[0] > _UNKNOWN * least[0]:
            way.trial = 0, 1
            return
        # What prompts take is no part of it: as many come with each token, however these are brought.
        load = load._replace(prompt_rows=0)
        most = min(self._most, max(self._max_rows // len(who.slots_R) - 1, 0))
        review = Review(who, load, self._survival, self.costs, self._lengths(way, most))
        self._budget.begin(review.plain_s)
        self._settle(way, review)
        self._declines_S[who.slots_R] = False
        if way.length:
            self._declines_S[review.decliners(way.length)] = True
        self._any_declines = bool(self._declines_S.any())
        length, steps = self._worth_trying(way, review, who)
        if steps:
            way.will_try(length, steps, review.most_gain(length))

    def _lengths(self, way: Way, most: int) -> list[int]:
        """That are looked at: all now and then, else none and those beside the one there is."""
        lengths = [length for length in self._ladder if length <= most]
        way.reviews += 1
        is_due = not way.length and self._idle >= self._retry_after
        if is_due or way.reviews <= _REVIEWS_OF_ALL or way.reviews % _REVIEWS_OF_ALL == 0:
            return lengths
        place = bisect_left(lengths, min(way.length, most))
        return sorted({0, *lengths[max(place - 1, 0) : place + 2]})

    def _settle(self, way: Way, review: Review) -> None:
        """Stay, or go over to what is better."""
        now = way.length if way.length in review.outlooks else 0
        best = max(self._not_risky(review, now), key=lambda length: review.outlooks[length].rate)
        gain = review.outlooks[best].rate / review.outlooks[now].rate
        side = 0 if gain < _BETTER else 1 if best > now else -1
        if gain > MUCH_BETTER or (side and side == way.challenger):
            now, side = best, 0
            way.review_at, way.reviews = way.steps + _REVIEW_YOUNG, 0  # others may be better still
        way.challenger = side
        if side:
            way.review_at = min(way.review_at, way.steps + _REVIEW_DOUBTFUL)
        if self._num_steps < self._rests_until:
            now = 0
        elif way.length and self._num_steps > self._rests_until + _RETRY_MOST:
            self._retry_after = _RETRY  # it has paid for long
        outlook = review.outlooks[now]
        way.length, way.rate, way.worth, way.cuts = now, outlook.rate, outlook.worth, outlook.cuts
        way.plain_s = review.plain_s

    def _not_risky(self, review: Review, now: int) -> list[int]:
        """Lengths whose steps take about what is foreseen, or are covered if they take the most they may."""
        rate = review.outlooks[0].rate
        return [
            length
            for length in review.outlooks
            if length in (0, now)
            or review.is_known(length)
            or self._budget.steps(review.most_loss_s(length, rate), 1)
        ]

    def _worth_trying(self, way: Way, review: Review, who: Decoding) -> tuple[int, int]:
        """A length whose costs may be much better than is known, where most is to be won for what may be
        lost, or any drafts after a long time without; and in how many steps the budget allows it."""
        lengths = [length for length in review.outlooks if length != way.length]
        if not lengths or self._num_steps < self._rests_until:
            return 0, 0
        most = max(_TRIED_STEPS, -(-_TRIED // len(who.slots_R))) if self.costs.know_drafts else 1
        best, found = 0.0, (0, 0)
        for length in lengths:
            hope = review.most_gain(length)
            gain = hope - way.rate
            if gain <= _WORTH_TRYING * way.rate or not way.may_try(length, hope):
                continue
            loss_s = max(review.most_loss_s(length, way.rate), _LEAST_LOSS * way.plain_s)
            if gain / loss_s > best and (steps := self._budget.steps(loss_s, most)):
                best, found = gain / loss_s, (length, steps)
        if found[1] or way.length:
            return found
        telling = [length for length in lengths if length >= _TELLING] or lengths[-1:]
        surprising = [each for each in telling if way.has_more_hope(each, review.most_gain(each))]
        if not surprising and self._idle < self._retry_after:
            return found
        length = max(surprising or telling, key=lambda length: review.outlooks[length].rate)
        if steps := self._budget.steps(review.most_loss_s(length, way.rate), most):
            self._retry_after = min(2 * self._retry_after, _RETRY_MOST) if not surprising else _RETRY
        return length, steps

    # Its drafts are to be cut.

    def trim(self, choice: Choice, plan: SchedulerOutput, load: Load, weights_R: FloatArray) -> Trim | None:
        """How the drafts of this plan are to be cut; None if they are not."""
        if not choice.cuts or choice.rate <= 0.0 or not self.tells_margins or not plan.num_draft_tokens:
            return None
        seconds_N = self.costs.pass_s(load, plan.num_batched_tokens)
        told = plan.slots.tobytes(), weights_R.tobytes(), self._survival.version, choice.rate
        fixed = self.costs.has_fixed_sizes
        if fixed:
            told = *told, plan.num_drafts.tobytes(), load.num_rows
        if self._last_trim is not None and self._last_trim[0] == told and self._last_trim[1] is seconds_N:
            return self._last_trim[2]  # most steps are as the one before
        survival = self._survival
        curves = survival.bias_K, survival.slope_K, survival.offsets(plan.slots), weights_R
        if fixed:
            trim = Trim(*curves, np.zeros(0, np.float32), self._room(choice, plan, load, weights_R))
        else:
            trim = Trim(*curves, seconds_N, rate=choice.rate)
        self._last_trim = told, seconds_N, trim
        return trim

    def _room(self, choice: Choice, plan: SchedulerOutput, load: Load, weights_R: FloatArray) -> int:
        """Rows of the pass that is best for the drafts to be expected, where passes have fixed sizes."""
        num_requests, num_drafts = plan.num_requests, plan.num_draft_tokens
        some = np.arange(0, num_requests, -(-num_requests // _SAMPLED))
        longest_R = plan.num_drafts[some]
        worths_RK = self._survival.means(plan.slots[some])[:, : int(plan.num_drafts.max())]
        possible_RK: BoolArray = np.arange(worths_RK.shape[1], dtype=np.int32) < longest_R[:, None]
        worths_RK = np.where(possible_RK, worths_RK * weights_R[some][:, None], np.float32(0.0))
        falling_M = np.sort(worths_RK, axis=None)[::-1]
        worth_M = np.concatenate(([0.0], np.cumsum(falling_M, dtype=np.float64)))
        worth_S = worth_M[np.arange(num_drafts + 1) * len(some) // num_requests] * (num_requests / len(some))
        gains_S = worth_S - choice.rate * self.costs.rest_s(load, num_drafts)
        rooms_S = self.costs.rooms(load, num_drafts)
        return int(rooms_S[np.argmax(gains_S)])

    # A step has ended.

    def learn(
        self,
        load: Load,
        num_drafts: int,
        draft_rows: int,
        draft_s: float,
        rest_s: float,
        *,
        num_drafting: int = 0,
        cuts: bool = False,
        num_alike: int = 1,
    ) -> None:
        """What a step took; as of `Costs.learn`."""
        self._num_ended += 1
        self.costs.learn(
            *(load, num_drafts, draft_rows, draft_s, rest_s),
            num_drafting=num_drafting,
            cuts=cuts,
            num_alike=num_alike,
        )

    def pay(self, choice: Choice, own_worth: float, worth: float, seconds: float, since_s: float) -> None:
        """Settle accounts for a step in which nothing but decoding was done.

        Args:
            own_worth: of a token of each of its requests, which a plain step would have brought.
            worth: of all tokens that it brought.
            seconds: that it took.
            since_s: of all steps since accounts were settled.
        """
        self._budget.earn(since_s, max(choice.plain_s, seconds))
        if choice.rate <= 0.0 or own_worth <= 0.0:
            return
        if choice.trial:
            self._budget.pay(seconds - worth / choice.rate)
        elif choice.length:
            plainly_s = worth / own_worth * choice.plain_s
            if self._budget.stake(seconds, choice.worth / choice.rate, choice.plain_s, plainly_s):
                self._rest()

    def _rest(self) -> None:
        """More was lost than may be: no drafts for a while, whatever is foreseen of them."""
        self._rests_until = self._num_steps + self._retry_after
        self._retry_after = min(2 * self._retry_after, _RETRY_MOST)
        for way in self._ways.values():
            way.length, way.trial, way.review_at = 0, (0, 0), 0
