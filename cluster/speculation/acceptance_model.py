"""Predicts which drafts the target accepts, from the drafter's margin, position, temperature and request.

    P(draft k is accepted | all before it were) = sigmoid(c + position_k + temperature + request + slope * x)
    x = log(1 + margin)

The margin is the drafter's best score minus its second best (`Trim`). All terms but the request's form one
ridge-regularized logistic regression. It is fitted online by Newton steps (Hastie et al., "The Elements of
Statistical Learning", 4.4.1) with exponentially decaying curvature, so it adapts to other text within about
fifty steps. Each running request has its own offset, fitted in the same way, because easy and hard texts
differ by more than margins show. If the drafter reports no margins, x is a constant.

A draft is observed if all before it in its block were accepted and it was verified. Drafts trimmed before
verification are not observed, and because trimming is by margin, the acceptance rate of the others would be
biased; the regression on the margin is not. The same model therefore gives the probabilities of the drafts of
recent blocks, verified or not (`samples`), from which the draft length is chosen.

Pure NumPy; used by `draft_length_policy.py`.

Legend: R requests of a step, B rows observed since the last update, M observed drafts, K most drafts of a
request, S slots, P parameters, T samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..step.scheduler_output import BoolArray, FloatArray, IntArray
from .acceptance_length import survival_of_length

Doubles = NDArray[np.float64]

NUM_SAMPLES = 64  # blocks stored for each slot
_MEAN_SAMPLES = 16  # of these, for the mean of one request
NO_MARGIN = math.expm1(1.3)  # used if no margin is reported: the median of reported ones
_UPDATE_STEPS, _FIRST_UPDATE_STEPS, _FIRST_UPDATES = 16, 2, 8  # an update costs about as much as a small step
_MAX_REQUESTS = 48  # observed in one step; more add cost and no accuracy
_TEMPERATURES = np.array([0.05, 0.55, 0.85])  # class bounds; greedy requests are the first class
_FADE, _REQUEST_FADE = 0.985, 0.96  # decay of the curvature per step: time constants of 67 and 25 steps
_INITIAL_BIAS, _INITIAL_SLOPE = -0.8, 1.4  # of a typical drafter: margin 2 is accepted 2 in 3 times
_RIDGE, _REQUEST_RIDGE = 4.0, 1.5  # pseudo-observations (times p(1 - p)) at the prior
_MAX_NEWTON_STEP = 1.5  # logits
_MIN_CURVATURE = 0.02  # lower bound of p(1 - p), so that the effect of one unlikely miss is bounded
_MAX_MARGIN = 50.0  # a draft above it is certain; a token forced by a grammar has an infinite margin
_FIRST_CHANCE = 0.75  # acceptance probability of each draft of an unknown drafter, given those before it
_MEAN_BLOCKS, _MEAN_PRIOR = 64.0, 4.0  # blocks in the mean probabilities, and pseudo-blocks of the prior
_LOADED_BLOCKS = 16.0  # weight of a loaded state, in blocks at most: the next texts may be different
_ERROR_BINS, _ERROR_FADE = 10, 0.999


class AcceptanceModel:
    """The acceptance probabilities of one engine's drafter.

    Args:
        max_drafts: K.
        num_slots: S.

    Attributes:
        version: increases when a prediction may have changed.
        num_drafters: number of drafters so far, the present one included.
    """

    def __init__(self, max_drafts: int, num_slots: int) -> None:
        self.version = self.num_drafters = 0
        self.num_slots, self._max_drafts = num_slots, max_drafts
        room = _UPDATE_STEPS * min(_MAX_REQUESTS, num_slots)
        # Observations since the last update: slot, temperature class, verified, accepted, continues, step.
        self._observed_6B = np.zeros((6, room), dtype=np.int64)
        self._margins_BK = np.zeros((room, max_drafts))  # nan where no draft was made
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, because the drafter was replaced."""
        self.num_drafters += 1
        most, slots = self._max_drafts, self.num_slots
        self._first_chance = _FIRST_CHANCE
        self._prior_P = np.zeros(2 + most + len(_TEMPERATURES))
        self._prior_P[:2] = _INITIAL_BIAS, _INITIAL_SLOPE
        self._theta_P = self._prior_P.copy()  # bias, slope, positions, temperatures
        self._curvature_PP = np.zeros((len(self._theta_P), len(self._theta_P)))
        self._request_S, self._request_curvature_S = np.zeros(slots), np.zeros(slots)
        self._temperature_S = np.zeros(slots, dtype=np.int64)  # class, 0 for greedy
        self._entered_S = np.zeros(slots, dtype=np.int64)  # step at which the slot's request was admitted
        # Probabilities of each slot's last blocks, also of its earlier requests: nan where no draft was made.
        self._samples_STK = np.full((slots, NUM_SAMPLES, most), np.nan, dtype=np.float32)
        self._reached_K, self._accepted_K = np.zeros(most), np.zeros(most)  # expected counts, decaying
        self._mean_K = self._mean_chances()
        self._binned_K3 = np.zeros((most, _ERROR_BINS, 3))  # observed, predicted, accepted
        self._step = self._updated_step = self._num_updates = self._num_observed = 0
        self._publish()

    @property
    def has_observations(self) -> bool:
        """Whether this engine has observed any drafts of this drafter."""
        return self._num_updates > 0

    def expect(self, acceptance_length: float) -> None:
        """Set the prior of unobserved drafts to this mean acceptance length (including the bonus token)."""
        length = min(max(acceptance_length, 1.0), self._max_drafts + 1.0)
        self._first_chance = survival_of_length(length, self._max_drafts)[0]
        self._mean_K = self._mean_chances()
        self.version += 1

    def admit(self, slots_R: IntArray, temperatures_R: Sequence[float]) -> None:
        """Record that these slots have new requests, sampled at these temperatures."""
        self.version += 1
        self._entered_S[slots_R] = self._step
        self._request_S[slots_R] = self._request_curvature_S[slots_R] = 0.0
        self._temperature_S[slots_R] = np.searchsorted(_TEMPERATURES, temperatures_R)

    # Predictions.

    def offsets(self, slots_R: IntArray) -> FloatArray:
        """Return the logit terms of requests and their temperatures, fp32 [R] (`Trim.bias_R`)."""
        return (self._request_S[slots_R] + self._temperature_terms(self._temperature_S[slots_R])).astype(
            np.float32
        )

    def samples(self, slots_R: IntArray, count: int) -> FloatArray:
        """Return the survival probabilities of each request's last `count` blocks, fp32 [count, R, K]."""
        places_T1 = (self._updated_step - 1 - np.arange(count)[:, None]) % NUM_SAMPLES
        return self._survivals(self._samples_STK[slots_R, places_T1])

    def means(self, slots_R: IntArray) -> FloatArray:
        """Return the mean survival probabilities of each request's recent blocks, fp32 [R, K]."""
        return self.samples(slots_R, _MEAN_SAMPLES).mean(axis=0)

    def _survivals(self, chances_XK: FloatArray) -> FloatArray:
        """Return survival probabilities; a draft not made has the mean probability of its position."""
        known_XK = np.where(np.isnan(chances_XK), self._mean_K, chances_XK)
        return np.cumprod(known_XK, axis=-1, dtype=np.float32)

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """Mean absolute difference of predicted and observed acceptance by position, over ten bins of the
        predicted probability; 0 where nothing was observed.
        """
        observed_K = np.maximum(self._binned_K3[:, :, 0].sum(axis=1), 1e-9)
        gaps_K = np.abs(self._binned_K3[:, :, 1] - self._binned_K3[:, :, 2]).sum(axis=1)
        return tuple((gaps_K / observed_K).tolist())

    # Learning.

    def observe(
        self,
        slots_R: IntArray,
        verified_R: IntArray,
        accepted_R: IntArray,
        continues_R: BoolArray,
        drafted_R: IntArray,
        margins_RK: FloatArray | None,
    ) -> None:
        """Record the outcome of one step's drafts.

        Args:
            slots_R: slots of the requests that drafted.
            verified_R, accepted_R: number of verified and accepted drafts of each request.
            continues_R: False where a request ended, so its first draft not accepted was not judged.
            drafted_R: number of drafts made.
            margins_RK: margins of the drafts; None if the drafter reports none.
        """
        if len(slots_R) > _MAX_REQUESTS:
            self._turn += _MAX_REQUESTS
            some = (self._turn + np.arange(_MAX_REQUESTS)) % len(slots_R)
            slots_R, verified_R, accepted_R = slots_R[some], verified_R[some], accepted_R[some]
            continues_R, drafted_R = continues_R[some], drafted_R[some]
            margins_RK = None if margins_RK is None else margins_RK[some]
        rows = slice(self._num_observed, self._num_observed + len(slots_R))
        columns = slots_R, self._temperature_S[slots_R], verified_R, accepted_R, continues_R, self._step
        for values_B, values_R in zip(self._observed_6B, columns, strict=True):
            values_B[rows] = values_R
        margins_BK = self._margins_BK[rows]
        margins_BK.fill(np.nan)
        if margins_RK is None:
            margins_BK[np.arange(self._max_drafts) < drafted_R[:, None]] = NO_MARGIN
        else:
            margins_BK[:, : margins_RK.shape[1]] = margins_RK
        self._num_observed, self._step = rows.stop, self._step + 1
        each = _UPDATE_STEPS if self._num_updates >= _FIRST_UPDATES else _FIRST_UPDATE_STEPS
        if self._step - self._updated_step >= each:
            self.update()

    def update(self) -> None:
        """Fit the model to the observations since the last update."""
        if not self._num_observed:
            return
        rows = slice(self._num_observed)
        slots_B, temperatures_B, verified_B, accepted_B, continues_B, step_B = self._observed_6B[:, rows]
        margins_BK = self._margins_BK[rows]
        made_BK: BoolArray = ~np.isnan(margins_BK)
        x_BK = np.log1p(np.minimum(np.where(made_BK, margins_BK, 0.0), _MAX_MARGIN))
        # A slot may have another request by now, whose offset its earlier observations must not change.
        own_B = step_B >= self._entered_S[slots_B]
        logits_BK = self._logits(slots_B, temperatures_B, x_BK, own_B)
        num_judged_B = np.minimum(accepted_B + (continues_B > 0), verified_B)
        judged_BK: BoolArray = made_BK & (np.arange(self._max_drafts) < num_judged_B[:, None])
        in_row_M, position_M = np.nonzero(judged_BK)
        chance_M = 1.0 / (1.0 + np.exp(-logits_BK[in_row_M, position_M]))
        accepted_M = position_M < accepted_B[in_row_M]
        miss_M, weight_M = accepted_M - chance_M, np.maximum(chance_M * (1.0 - chance_M), _MIN_CURVATURE)
        steps = self._step - self._updated_step
        features_MP = self._features(x_BK[in_row_M, position_M], position_M, temperatures_B[in_row_M])
        self._fit_shared(features_MP, miss_M, weight_M, _FADE**steps)
        own_M = own_B[in_row_M]
        self._fit_requests(slots_B[in_row_M][own_M], miss_M[own_M], weight_M[own_M], _REQUEST_FADE**steps)
        self._count_errors(position_M, chance_M, accepted_M, _ERROR_FADE**steps)
        chances_BK = 1.0 / (1.0 + np.exp(-self._logits(slots_B, temperatures_B, x_BK, own_B)))
        self._remember(slots_B, step_B, np.where(made_BK, chances_BK, np.nan))
        self._num_observed, self._updated_step = 0, self._step
        self._num_updates += 1
        self._publish()

    def _logits(
        self, slots_B: NDArray[np.int64], temperatures_B: NDArray[np.int64], x_BK: Doubles, own_B: BoolArray
    ) -> Doubles:
        offset_B = self._temperature_terms(temperatures_B) + self._request_S[slots_B] * own_B
        positions_K = self._theta_P[2 : 2 + self._max_drafts]
        return self._theta_P[0] + self._theta_P[1] * x_BK + positions_K + offset_B[:, None]

    def _temperature_terms(self, temperatures_X: NDArray[np.int64]) -> Doubles:
        return np.concatenate(([0.0], self._theta_P[2 + self._max_drafts :]))[temperatures_X]

    def _features(
        self, x_M: Doubles, position_M: NDArray[np.int64], temperature_M: NDArray[np.int64]
    ) -> Doubles:
        features_MP = np.zeros((len(x_M), len(self._theta_P)))
        features_MP[:, 0], features_MP[:, 1] = 1.0, x_M
        every_M = np.arange(len(x_M))
        features_MP[every_M, 2 + position_M] = 1.0
        hot_M = np.flatnonzero(temperature_M)
        features_MP[hot_M, 1 + self._max_drafts + temperature_M[hot_M]] = 1.0
        return features_MP

    def _fit_shared(self, features_MP: Doubles, miss_M: Doubles, weight_M: Doubles, fade: float) -> None:
        """Make one Newton step on the decayed log-likelihood with its ridge penalty."""
        self._curvature_PP *= fade
        self._curvature_PP += (features_MP * weight_M[:, None]).T @ features_MP
        # At the last optimum the gradient of old observations balanced that of the ridge; part of it has
        # decayed.
        gradient_P = features_MP.T @ miss_M - (1.0 - fade) * _RIDGE * (self._theta_P - self._prior_P)
        ridge_PP = _RIDGE * np.eye(len(gradient_P))
        step_P = np.linalg.solve(self._curvature_PP + ridge_PP, gradient_P)
        self._theta_P += np.clip(step_P, -_MAX_NEWTON_STEP, _MAX_NEWTON_STEP)
        self._theta_P[1] = max(self._theta_P[1], 0.0)  # a larger margin never lowers the probability

    def _fit_requests(
        self, slot_M: NDArray[np.int64], miss_M: Doubles, weight_M: Doubles, fade: float
    ) -> None:
        """Make the same Newton step for the requests' own offsets."""
        miss_S, weight_S = (np.bincount(slot_M, values, self.num_slots) for values in (miss_M, weight_M))
        fade_S = np.where(weight_S > 0.0, fade, 1.0)
        self._request_curvature_S = fade_S * self._request_curvature_S + weight_S
        gradient_S = miss_S - (1.0 - fade_S) * _REQUEST_RIDGE * self._request_S
        step_S = gradient_S / (self._request_curvature_S + _REQUEST_RIDGE)
        self._request_S += np.clip(step_S, -_MAX_NEWTON_STEP, _MAX_NEWTON_STEP)

    def _publish(self) -> None:
        self.version += 1
        most = self._max_drafts
        self.bias_K = (self._theta_P[0] + self._theta_P[2 : 2 + most]).astype(np.float32)
        self.slope_K = np.full(most, self._theta_P[1], dtype=np.float32)

    def _remember(self, slots_B: NDArray[np.int64], step_B: NDArray[np.int64], chances_BK: Doubles) -> None:
        """Store the probabilities of these blocks as samples, and add them to the mean probabilities."""
        self._samples_STK[slots_B, step_B % NUM_SAMPLES] = chances_BK
        made_BK = ~np.isnan(chances_BK)
        survival_BK = np.cumprod(np.where(made_BK, chances_BK, 0.0), axis=1)
        reached_BK = np.hstack((np.ones((len(slots_B), 1)), survival_BK[:, :-1])) * made_BK
        fade_K = np.where(made_BK.any(axis=0), math.exp(-len(slots_B) / _MEAN_BLOCKS), 1.0)
        self._reached_K = fade_K * self._reached_K + reached_BK.sum(axis=0)
        self._accepted_K = fade_K * self._accepted_K + survival_BK.sum(axis=0)
        self._mean_K = self._mean_chances()

    def _mean_chances(self) -> Doubles:
        """Return the mean acceptance probability by position, given that all drafts before it were accepted
        [K].

        A position that few blocks reached is smoothed towards the one before it.
        """
        chance, chances = self._first_chance, list[float]()
        for reached, accepted in zip(self._reached_K.tolist(), self._accepted_K.tolist(), strict=True):
            chance = (accepted + _MEAN_PRIOR * chance) / (reached + _MEAN_PRIOR)
            chances.append(chance)
        return np.array(chances)

    def _count_errors(
        self, position_M: NDArray[np.int64], chance_M: Doubles, accepted_M: BoolArray, fade: float
    ) -> None:
        bins_M = np.minimum((chance_M * _ERROR_BINS).astype(np.int64), _ERROR_BINS - 1)
        places_M = position_M * _ERROR_BINS + bins_M
        self._binned_K3 *= fade
        for index, values_M in enumerate((np.ones_like(chance_M), chance_M, accepted_M)):
            sums = np.bincount(places_M, values_M, self._max_drafts * _ERROR_BINS)
            self._binned_K3[:, :, index] += sums.reshape(self._max_drafts, _ERROR_BINS)

    # Persistence.

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return what was learned about the drafter, without the state of single requests."""
        return {
            "theta": self._theta_P.tolist(),
            "curvature": self._curvature_PP.tolist(),
            "reached": self._reached_K.tolist(),
            "accepted": self._accepted_K.tolist(),
        }

    def read(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned.

        Raises:
            ValueError: it is malformed, or for a drafter of another block size; nothing is changed.
        """
        theta_P = _read_array(saved, "theta", self._theta_P)
        curvature_PP = _read_array(saved, "curvature", self._curvature_PP)
        reached_K = _read_array(saved, "reached", self._reached_K)
        accepted_K = _read_array(saved, "accepted", self._accepted_K)
        share = min(1.0, _LOADED_BLOCKS / max(float(reached_K[0]), 1e-9))
        self._theta_P, self._curvature_PP = theta_P, share * curvature_PP
        self._reached_K, self._accepted_K = share * reached_K, share * accepted_K
        self._mean_K = self._mean_chances()
        self._publish()


def _read_array(saved: Mapping[str, Any], name: str, like: Doubles) -> Doubles:
    try:
        array = np.array(saved[name], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a saved acceptance model: {name}") from error
    if array.shape != like.shape:
        raise ValueError(f"saved for another block size: {name}")
    if not np.isfinite(array).all():
        raise ValueError(f"not finite: {name}")
    return array
