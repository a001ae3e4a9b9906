"""How likely drafts are to stand: by position, by how sure the drafter is of them, and by request.

    chance of draft k, if those before it stand = sigmoid(bias_R + bias_K + slope_K x),   x = log(1 + margin)
    bias_R = of the request + of requests as hot as it is

A logistic regression for each position, fitted while the engine runs: each update is one Newton step over
what was judged since the last one, on a curvature that fades, so that another text or drafter is noticed
within some fifty steps. As far as a position has seen little it is held to the one before it, the first to
what all have in common, and that to a guess which gives a new drafter credit. Easy and hostile texts differ
by more than margins say, so every request has a bias of its own, held to none; and the same margin means less
at a high temperature, so it begins with that of the requests that were as hot. Where margins are not told x
is a constant, and position and request decide.

Judged are the drafts up to the first that falls; none behind it, none that was cut off, none behind a
request's end. What is learned of margins holds for drafts that were cut, too: they are chosen by margin, and
so the accepted share of those that were verified would mislead. So plans are made with *samples*: what the
drafts of the last steps were, by this curve, likely to bring, verified or not. Longer blocks than were made
are taken to go on as they did before.

Pure; used by `policy.py` alone.

Legend: R requests of a step, B of all steps since the last update, K most drafts, S slots, T samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan import BoolArray, FloatArray, IntArray
from ..roofline import survival_of_length

Doubles = NDArray[np.float64]

NUM_SAMPLES = 16  # of a request
_NUM_COMMON = 64  # of all: new requests begin with some of these
_STEP = _NUM_COMMON // NUM_SAMPLES
_MANY_STEPS, _FEW_STEPS = 16, 2  # an update is due
_YOUNG = 8  # so many updates are due sooner
_MOST_REQUESTS = 48  # of a step: more tell little more
_HEATS = np.array([0.05, 0.55, 0.85])  # temperatures between which requests are as hot
_FADE, _OWN_FADE = 0.985, 0.96  # per step
_GUESS = np.array([-0.8, 1.4])  # bias and slope: a margin of 2 stands in two cases of three
_NO_MARGIN = math.expm1(1.3)  # where none is told
_HELD = np.array([[4.0, 4.0], [4.0, 6.0]])  # curvature of what is held to
_OWN_HELD = 1.5  # of a request's own bias: most are within 0.8 of the others
_HEAT_HELD, _HEAT_STEP = 8.0, 0.5  # of what a temperature adds; part of a step, for others take theirs, too
_MOST_STEP = 1.5  # of a Newton step
_MOST_MARGIN = 50.0  # as sure as that is sure: without a bound a forced token would outweigh all others
_ERROR_BINS, _ERROR_FADE = 10, 0.999
_FIRST_CHANCE = 0.75  # that a draft stands, of a drafter of which nothing is known
_FEW_THERE = 4.0
_KEPT_SEEN, _KEPT_THERE = 12.0, 16.0  # what is kept counts as so much was seen, at most: texts differ


class Survival:
    """Of one engine's drafter.

    Args:
        most: drafts per request at most (K).
        num_slots: S.

    Attributes:
        version: counts changes of what is told.
        num_drafters: that there were.
    """

    def __init__(self, most: int, num_slots: int) -> None:
        self.version = self.num_drafters = 0
        self._most, self.num_slots = most, num_slots
        self._nobody = num_slots  # a slot more, of those that have left
        self._turn = 0
        # What was judged since the last update, the first `_num_pending` rows.
        room = _MANY_STEPS * min(_MOST_REQUESTS, num_slots)
        self._counts_5B = np.zeros((5, room), dtype=np.int32)  # slot, heat, verified, accepted, goes on
        self._x_BK = np.zeros((room, most))  # margins; nan where there is no draft
        self._step_B = np.zeros(room, dtype=np.int64)
        self.renew()

    def renew(self) -> None:
        """Another drafter: all that is known is of the last one."""
        self.num_drafters += 1
        self._first_chance = _FIRST_CHANCE
        most, slots = self._most, self.num_slots + 1
        self._common, self._common_seen = _GUESS.copy(), np.zeros((2, 2))
        self._curve_K2, self._seen_K22 = np.tile(_GUESS, (most, 1)), np.zeros((most, 2, 2))
        self._held_to_K2 = self._curve_K2.copy()
        self._own_S, self._own_seen_S = np.zeros(slots), np.zeros(slots)
        self._heat_S = np.zeros(slots, dtype=np.int64)
        self._heat_bias_H, self._heat_seen_H = np.zeros(len(_HEATS) + 1), np.zeros(len(_HEATS) + 1)
        self._reached_K, self._stood_K = np.zeros(most), np.zeros(most)  # of late, as far as was foreseen
        self._guesses_K = self._guesses()
        # Chances of late drafts; nan where there was none.
        self._samples_STK = np.full((slots, NUM_SAMPLES, most), np.nan, dtype=np.float32)
        self._all_CK = np.full((_NUM_COMMON, most), np.nan, dtype=np.float32)
        self._num_all = 0
        self._last_S = np.zeros(slots, dtype=np.int64)  # place of a slot's last sample
        self._since_S = np.zeros(slots, dtype=np.int64)  # when its request entered, in steps learned
        self._num_learned = 0
        self._binned_K3 = np.zeros((most, _ERROR_BINS, 3))  # judged, foreseen, accepted
        self._num_pending = self._num_steps = self._num_updates = 0
        self._publish()

    @property
    def knows_drafts(self) -> bool:
        """Whether any have been judged."""
        return self._num_updates > 0

    def expect(self, length: float) -> None:
        """Begin with this mean acceptance length (bonus token included) where no drafts were judged yet."""
        length = min(max(length, 1.0), self._most + 1.0)
        self._first_chance = survival_of_length(length, self._most)[0]
        self._guesses_K = self._guesses()
        self.version += 1

    def enter(self, slots_R: IntArray, temperatures_R: Sequence[float]) -> None:
        """These slots have new requests."""
        self.version += 1
        self._since_S[slots_R] = self._num_learned
        self._own_S[slots_R] = self._own_seen_S[slots_R] = 0.0
        self._heat_S[slots_R] = np.searchsorted(_HEATS, temperatures_R)
        for slot in slots_R.tolist():
            self._samples_STK[slot] = self._all_CK[slot % _STEP :: _STEP]

    def offsets(self, slots_R: IntArray) -> FloatArray:
        """What each request's own past and its temperature add (`Trim.bias_R`)."""
        return (self._own_S[slots_R] + self._heat_bias_H[self._heat_S[slots_R]]).astype(np.float32)

    def samples(self, slots_R: IntArray, count: int) -> FloatArray:
        """The survivals of each request's last drafts, fp32 [T, R, K] for T = `count`."""
        places_TR = (self._last_S[slots_R] - np.arange(count)[:, None]) % NUM_SAMPLES
        return self._survivals(self._samples_STK[slots_R, places_TR])

    def means(self, slots_R: IntArray) -> FloatArray:
        """Of each request's samples, fp32 [R, K]."""
        return self._survivals(self._samples_STK[slots_R]).mean(axis=1)

    def _survivals(self, chances_XK: FloatArray) -> FloatArray:
        """Where a draft was not made, as others are there."""
        known_XK = np.where(np.isnan(chances_XK), self._guesses_K, chances_XK)
        return np.cumprod(known_XK, axis=-1, dtype=np.float32)

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """By position, how far chances that were foreseen are from what came: the mean distance over tenths
        of the chance, weighted by how often each was foreseen; 0 where nothing was judged."""
        judged_K = np.maximum(self._binned_K3[:, :, 0].sum(axis=1), 1e-9)
        gaps_K = np.abs(self._binned_K3[:, :, 1] - self._binned_K3[:, :, 2]).sum(axis=1)
        return tuple((gaps_K / judged_K).tolist())

    def learn(
        self,
        slots_R: IntArray,
        verified_R: IntArray,
        accepted_R: IntArray,
        goes_on_R: BoolArray,
        drafted_R: IntArray,
        margins_RK: FloatArray | None,
    ) -> None:
        """What became of a step's drafts.

        Args:
            slots_R: of the requests that drafted.
            verified_R, accepted_R: drafts of each.
            goes_on_R: where a request ended, drafts behind its end were not judged.
            drafted_R: that were made; margins are told for these.
        """
        if len(slots_R) > _MOST_REQUESTS:
            self._turn += _MOST_REQUESTS
            some = (self._turn + np.arange(_MOST_REQUESTS)) % len(slots_R)
            slots_R, verified_R, accepted_R = slots_R[some], verified_R[some], accepted_R[some]
            goes_on_R, drafted_R = goes_on_R[some], drafted_R[some]
            margins_RK = None if margins_RK is None else margins_RK[some]
        rows = slice(self._num_pending, self._num_pending + len(slots_R))
        x_BK = self._x_BK[rows]
        columns = slots_R, self._heat_S[slots_R], verified_R, accepted_R, goes_on_R
        for values_B, values_R in zip(self._counts_5B, columns, strict=True):
            values_B[rows] = values_R
        x_BK.fill(np.nan)
        if margins_RK is None:
            x_BK[np.arange(self._most) < drafted_R[:, None]] = _NO_MARGIN
        else:
            x_BK[:, : margins_RK.shape[1]] = margins_RK
        self._step_B[rows] = self._num_learned
        self._num_learned += 1
        self._num_pending, self._num_steps = rows.stop, self._num_steps + 1
        if self._num_steps >= (_MANY_STEPS if self._num_updates >= _YOUNG else _FEW_STEPS):
            self._update()

    def settle(self) -> None:
        """Take in now what was learned since the last update."""
        if self._num_pending:
            self._update()

    def _update(self) -> None:
        steps, rows = self._num_steps, slice(self._num_pending)
        slots_B, heats_B, verified_B, accepted_B, goes_on_B = self._counts_5B[:, rows]
        slots_B = np.where(self._step_B[rows] < self._since_S[slots_B], self._nobody, slots_B)
        self._num_pending = self._num_steps = 0
        self._num_updates += 1
        position_K = np.arange(self._most)
        margins_BK = self._x_BK[rows]
        told_BK: BoolArray = ~np.isnan(margins_BK)
        x_BK = np.log1p(np.minimum(np.where(told_BK, margins_BK, 0.0), _MOST_MARGIN))
        chances_BK = self._chances(slots_B, heats_B, x_BK)
        stood_BK: BoolArray = position_K < accepted_B[:, None]
        # The first that falls is judged, too, where the request goes on behind it.
        reached_BK: BoolArray = position_K < (accepted_B + (goes_on_B > 0))[:, None]
        judged_BK: BoolArray = told_BK & reached_BK & (position_K < verified_B[:, None])
        miss_BK = np.where(judged_BK, stood_BK - chances_BK, 0.0)
        weight_BK = np.where(judged_BK, np.maximum(chances_BK * (1 - chances_BK), 0.02), 0.0)
        self._count_errors(judged_BK, chances_BK, stood_BK, _ERROR_FADE**steps)
        self._fit_curves(miss_BK, weight_BK, x_BK, _FADE**steps)
        miss_B, weight_B = miss_BK.sum(axis=1), weight_BK.sum(axis=1)
        self._fit_heats(heats_B, miss_B, weight_B, _FADE**steps)
        self._fit_own(slots_B, miss_B, weight_B)
        self._publish()
        self._remember(slots_B, self._chances(slots_B, heats_B, x_BK), told_BK)

    def _chances(self, slots_B: IntArray, heats_B: IntArray, x_BK: Doubles) -> Doubles:
        """Of each draft, if those before it stand."""
        bias_B = self._own_S[slots_B] + self._heat_bias_H[heats_B]
        logits_BK = bias_B[:, None] + self._curve_K2[:, 0] + self._curve_K2[:, 1] * x_BK
        return 1.0 / (1.0 + np.exp(-logits_BK))

    def _fit_curves(self, miss_BK: Doubles, weight_BK: Doubles, x_BK: Doubles, fade: float) -> None:
        """A Newton step of each position's curve, and of what they share."""
        pull_K2 = np.stack((miss_BK.sum(axis=0), (miss_BK * x_BK).sum(axis=0)), axis=1)
        h00, h01 = weight_BK.sum(axis=0), (weight_BK * x_BK).sum(axis=0)
        h11 = (weight_BK * x_BK * x_BK).sum(axis=0)
        seen_K22 = np.stack((h00, h01, h01, h11), axis=1).reshape(-1, 2, 2)
        if not h00.any():
            return
        # Old data's pull balanced that of the guess; of the old data a part is gone.
        self._common_seen = fade * self._common_seen + seen_K22.sum(axis=0)
        homeward = (1 - fade) * (_HELD @ (self._common - _GUESS))
        step = _newton(self._common_seen + _HELD, pull_K2.sum(axis=0) - homeward)
        self._common = self._common + step
        fades_K = np.where(h00 > 0, fade, 1.0)  # what is not tried does not fade
        self._seen_K22 = fades_K[:, None, None] * self._seen_K22 + seen_K22
        before_K2, self._held_to_K2 = self._held_to_K2, np.vstack((self._common, self._curve_K2[:-1]))
        homeward_K2 = (1 - fades_K)[:, None] * ((self._curve_K2 - before_K2) @ _HELD)
        along_K2 = (self._held_to_K2 - before_K2) @ _HELD
        self._curve_K2 += _newton(self._seen_K22 + _HELD, pull_K2 - homeward_K2 + along_K2)
        np.maximum(self._curve_K2[:, 1], 0.0, out=self._curve_K2[:, 1])  # surer is never worse

    def _fit_heats(self, heats_B: IntArray, miss_B: Doubles, weight_B: Doubles, fade: float) -> None:
        """The same of what temperatures add."""
        count = len(self._heat_bias_H)
        miss_H, weight_H = (np.bincount(heats_B, values, minlength=count) for values in (miss_B, weight_B))
        fade_H = np.where(weight_H > 0, fade, 1.0)
        self._heat_seen_H = fade_H * self._heat_seen_H + weight_H
        pull_H = miss_H - (1 - fade_H) * _HEAT_HELD * self._heat_bias_H
        self._heat_bias_H += _HEAT_STEP * pull_H / (self._heat_seen_H + _HEAT_HELD)

    def _fit_own(self, slots_B: IntArray, miss_B: Doubles, weight_B: Doubles) -> None:
        """The same of each request's own bias."""
        count = self.num_slots + 1
        miss_S, weight_S, steps_S = (
            np.bincount(slots_B, values, minlength=count) for values in (miss_B, weight_B, weight_B > 0)
        )
        fade_S = _OWN_FADE**steps_S
        self._own_seen_S = fade_S * self._own_seen_S + weight_S
        pull_S = miss_S - (1 - fade_S) * _OWN_HELD * self._own_S
        self._own_S += np.clip(pull_S / (self._own_seen_S + _OWN_HELD), -_MOST_STEP, _MOST_STEP)

    def _publish(self) -> None:
        self.version += 1
        self.bias_K, self.slope_K = self._curve_K2.T.astype(np.float32)

    def _remember(self, slots_B: IntArray, chances_BK: Doubles, told_BK: BoolArray) -> None:
        """Keep what these drafts were likely to bring."""
        count, survival_BK = len(slots_B), np.cumprod(np.where(told_BK, chances_BK, 0.0), axis=1)
        before_BK = np.ones_like(survival_BK)
        before_BK[:, 1:] = survival_BK[:, :-1]
        fades_K = np.where(told_BK.any(axis=0), math.exp(-count / _NUM_COMMON), 1.0)
        self._reached_K = fades_K * self._reached_K + (before_BK * told_BK).sum(axis=0)
        self._stood_K = fades_K * self._stood_K + survival_BK.sum(axis=0)
        self._guesses_K = self._guesses()
        chances_BK = np.where(told_BK, chances_BK, np.nan)
        places = (self._num_all + np.arange(count)) % _NUM_COMMON
        self._all_CK[places] = chances_BK
        self._num_all += count
        if self._num_all < _NUM_COMMON:  # what was only guessed gives way at once
            self._all_CK[self._num_all :] = np.resize(chances_BK, (_NUM_COMMON - self._num_all, self._most))
            self._samples_STK[:] = self._all_CK[: NUM_SAMPLES * _STEP : _STEP]
            return
        # The n-th of a slot goes n places further than its last one; of too many the last ones stay.
        order_B = np.argsort(slots_B, kind="stable")
        sorted_B = slots_B[order_B]
        first_B = np.searchsorted(sorted_B, sorted_B)
        places_B = (self._last_S[sorted_B] + 1 + np.arange(count) - first_B) % NUM_SAMPLES
        self._samples_STK[sorted_B, places_B] = chances_BK[order_B]
        self._last_S[sorted_B] = places_B

    def _guesses(self) -> Doubles:
        """Of drafts whose margins are not known, if those before them stand [K]: as others at the same place,
        and as far as few were there, as those one place before."""
        chance, guesses = self._first_chance, list[float]()
        for reached, stood in zip(self._reached_K.tolist(), self._stood_K.tolist(), strict=True):
            chance = (stood + _FEW_THERE * chance) / (reached + _FEW_THERE)
            guesses.append(chance)
        return np.array(guesses)

    def _count_errors(
        self, judged_BK: BoolArray, chances_BK: Doubles, stood_BK: BoolArray, fade: float
    ) -> None:
        tenths_BK = np.minimum((chances_BK * _ERROR_BINS).astype(np.int64), _ERROR_BINS - 1)
        places = (np.arange(self._most) * _ERROR_BINS + tenths_BK)[judged_BK]
        self._binned_K3 *= fade
        for index, values_BK in enumerate((np.ones_like(chances_BK), chances_BK, stood_BK)):
            sums = np.bincount(places, values_BK[judged_BK], minlength=self._most * _ERROR_BINS)
            self._binned_K3[:, :, index] += sums.reshape(self._most, _ERROR_BINS)

    # Between starts.

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """What is known of the drafter, and of no request."""
        columns = {
            "common": (self._common, self._common_seen),
            "positions": (self._curve_K2, self._seen_K22),
            "heats": (self._heat_bias_H, self._heat_seen_H),
            "foreseen": (self._reached_K, self._stood_K),
        }
        return {name: [values.tolist() for values in both] for name, both in columns.items()}

    def read(self, kept: Mapping[str, Any]) -> None:
        """Begin with what `as_json` gave, as if little of it had been seen; ValueError, with nothing changed,
        where it is something else."""
        (common, common_seen), (curve_K2, seen_K22), (bias_H, heat_seen_H), (reached_K, stood_K) = (
            _read_both(kept, name, like)
            for name, like in (
                ("common", (self._common, self._common_seen)),
                ("positions", (self._curve_K2, self._seen_K22)),
                ("heats", (self._heat_bias_H, self._heat_seen_H)),
                ("foreseen", (self._reached_K, self._stood_K)),
            )
        )
        self._common, self._curve_K2, self._heat_bias_H = common, curve_K2, bias_H
        self._common_seen = common_seen * _at_most(_KEPT_SEEN, common_seen[:1, :1])
        self._seen_K22 = seen_K22 * _at_most(_KEPT_SEEN, seen_K22[:, :1, :1])
        self._heat_seen_H = heat_seen_H * _at_most(_KEPT_SEEN, heat_seen_H)
        less_K = _at_most(_KEPT_THERE, reached_K)
        self._reached_K, self._stood_K = reached_K * less_K, stood_K * less_K
        self._held_to_K2 = np.vstack((common, curve_K2[:-1]))
        self._guesses_K = self._guesses()
        self._publish()


def _read_both(kept: Mapping[str, Any], name: str, like: tuple[Doubles, Doubles]) -> tuple[Doubles, Doubles]:
    try:
        first, second = (np.array(values, dtype=np.float64) for values in kept[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these are no chances of drafts: {name}") from error
    if (first.shape, second.shape) != (like[0].shape, like[1].shape):
        raise ValueError(f"these are chances of other drafts: {name}")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError(f"these are no numbers: {name}")
    return first, second


def _at_most(most: float, seen: Doubles) -> Doubles:
    """What makes that of what was seen."""
    return most / np.maximum(seen, most)


def _newton(curvature_22: Doubles, pull_2: Doubles) -> Doubles:
    """The step of a bias and a slope, bounded; also of many at once."""
    a, b, d = curvature_22[..., 0, 0], curvature_22[..., 0, 1], curvature_22[..., 1, 1]
    x, y = pull_2[..., 0], pull_2[..., 1]
    step_2 = np.stack((d * x - b * y, a * y - b * x), axis=-1) / (a * d - b * b)[..., None]
    return np.clip(step_2, -_MOST_STEP, _MOST_STEP)
