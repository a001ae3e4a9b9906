"""Predicts which drafts the target accepts, from the drafter's margin, position, temperature and request.

    P(draft k is accepted | all before it were) = sigmoid(bias + slope x + p log(k) + t temperature + request)
    x = log(1 + margin)

The margin is the drafter's best score minus its second best (`Trim`); x is 1 if none is reported. All terms
but the request's form one ridge-regularized logistic regression, fitted online by Newton steps (Hastie et
al., "The Elements of Statistical Learning", 4.4.1) with exponentially decaying curvature. Each running
request has its own offset, fitted in the same way. A draft is observed if it was verified and all before it
were accepted. Trimming by margin does not bias a regression on the margin, so the model also gives the
probabilities of drafts that were not verified (`samples`), from which the draft length is chosen.

Legend: R requests of a step, B blocks observed since the last update, M observed drafts, K most drafts of a
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

NUM_BLOCKS = 64  # stored for each slot, in each estimate, and observed in one step; more add only cost
NO_MARGIN = math.e - 1.0  # used if no margin is reported: x is 1
UPDATE_STEPS = 16  # at most; an update costs about as much as a small step
FADE = 1.0 - 1.0 / NUM_BLOCKS  # decay of the curvature per step: a time constant of as many steps
_FIRST_CHANCE = 0.75  # of each draft of an unknown drafter, given those before: an acceptance length of 4
PRIOR_BIAS, PRIOR_SLOPE = math.log(_FIRST_CHANCE / (1.0 - _FIRST_CHANCE)) - 1.0, 1.0
# Pseudo-observations (times p(1 - p)) at the prior, of mean probabilities and of factors of branches; 4 for
# shared terms and 1.5 for offsets are no better (mean of 60 simulated cells 1.0150; 1.0144 with 2 for both).
RIDGE = 2.0
_MAX_NEWTON_STEP = 1.5  # logits; without a bound the calibration error is 0.13 instead of below 0.08 (test)
_MIN_CURVATURE = 0.02  # lower bound of p(1 - p), so that the effect of one unlikely miss is bounded
_MAX_MARGIN = 50.0  # a draft above it is certain; a token forced by a grammar has an infinite margin
_ERROR_BINS = 10
_MAX_SAVED = 1e6  # bound of all saved numbers, which another program may have written


class AcceptanceModel:
    """The acceptance probabilities of one engine's drafter, one of `num_drafters` so far.

    `bias_K` and `slope_K` are those of `Trim`.
    """

    def __init__(self, max_drafts: int, num_slots: int) -> None:
        self.num_slots, self._max_drafts = num_slots, max_drafts
        self._log_position_K = np.log1p(np.arange(max_drafts))
        self.num_drafters = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, because the drafter was replaced."""
        self.num_drafters += 1
        maximum, slots = self._max_drafts, self.num_slots
        self._first_chance = _FIRST_CHANCE
        # bias, slope, position, temperature: `_FIRST_CHANCE` without a margin
        self._prior_P = np.array([PRIOR_BIAS, PRIOR_SLOPE, 0.0, 0.0])
        self._theta_P = self._prior_P.copy()
        self._curvature_PP = np.zeros((len(self._theta_P), len(self._theta_P)))
        self._request_S, self._request_curvature_S = np.zeros(slots), np.zeros(slots)
        self._temperature_S = np.zeros(slots)
        # x of each slot's last blocks, also of its earlier requests: nan where no draft was made.
        self._x_STK = np.full((slots, NUM_BLOCKS, maximum), np.nan, dtype=np.float32)
        self._num_blocks_S = np.zeros(slots, dtype=np.int64)
        self._reached_K, self._accepted_K = np.zeros(maximum), np.zeros(maximum)  # expected counts, decaying
        # Observed drafts, and predicted minus accepted ones by bin of their probability; both decay.
        self._observed_K, self._gaps_KE = np.zeros(maximum), np.zeros((maximum, _ERROR_BINS))
        self._pending: list[tuple[NDArray[Any], ...]] = []  # slots, steps, accepted, judged, x of blocks
        self._step = self._updated_step = 0
        self._publish()

    @property
    def has_observations(self) -> bool:
        """Whether this engine has observed any drafts of this drafter."""
        return self._updated_step > 0

    def set_prior(self, acceptance_length: float) -> None:
        """Set the prior of unobserved drafts to this mean acceptance length (including the bonus token)."""
        length = min(max(acceptance_length, 1.0), self._max_drafts + 1.0)
        self._first_chance = survival_of_length(length, self._max_drafts)[0]
        self._publish()

    def admit(self, slots_R: IntArray, temperatures_R: Sequence[float]) -> None:
        """Record that these slots have new requests, sampled at these temperatures."""
        self.update()  # what was observed is of earlier requests
        self._request_S[slots_R] = self._request_curvature_S[slots_R] = 0.0
        self._temperature_S[slots_R] = temperatures_R

    # Predictions.

    def offsets(self, slots_R: IntArray) -> FloatArray:
        """Return the logit terms of requests and their temperatures, fp32 [R] (`Trim.bias_R`)."""
        offsets_R = self._request_S[slots_R] + self._theta_P[3] * self._temperature_S[slots_R]
        return offsets_R.astype(np.float32)

    def samples(self, slots_R: IntArray, count: int) -> FloatArray:
        """Return the survival probabilities of each request's last `count` blocks, fp32 [count, R, K]."""
        places_TR = (self._num_blocks_S[slots_R] - 1 - np.arange(count)[:, None]) % NUM_BLOCKS
        x_TRK = self._x_STK[slots_R, places_TR].astype(np.float64)
        # A draft not made has the mean probability of its position.
        known_TRK = np.where(np.isnan(x_TRK), self._mean_K, self._chances(slots_R, x_TRK))
        return np.cumprod(known_TRK, axis=-1, dtype=np.float32)

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """Mean absolute difference of predicted and observed acceptance by position, over ten bins."""
        gaps_K = np.abs(self._gaps_KE).sum(axis=1)
        return tuple((gaps_K / np.maximum(self._observed_K, 1.0)).tolist())

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
        """Record how many drafts of the requests that drafted were verified, accepted and made, and margins.

        `continues_R` is False where a request ended, so its first draft not accepted was not judged.
        """
        some = np.arange(len(slots_R))
        if len(some) > NUM_BLOCKS:
            some = (self._step * NUM_BLOCKS + some[:NUM_BLOCKS]) % len(some)
        x_BK = np.full((len(some), self._max_drafts), np.nan)
        if margins_RK is None:
            x_BK[np.arange(self._max_drafts) < drafted_R[some, None]] = 1.0
        else:
            x_BK[:, : margins_RK.shape[1]] = np.log1p(np.minimum(margins_RK[some], _MAX_MARGIN))
        judged_R = np.minimum(accepted_R + continues_R, verified_R)
        places_B = self._num_blocks_S[slots_R[some]] % NUM_BLOCKS
        self._num_blocks_S[slots_R[some]] += 1
        self._pending.append((slots_R[some], places_B, accepted_R[some], judged_R[some], x_BK))
        self._step += 1
        if len(self._pending) >= UPDATE_STEPS:
            self.update()

    def update(self) -> None:
        """Fit the model to the observations since the last update."""
        if not self._pending:
            return
        slots_B, places_B, accepted_B, judged_B, x_BK = map(np.concatenate, zip(*self._pending, strict=True))
        fade = FADE ** len(self._pending)
        self._pending.clear()
        self._updated_step = self._step
        block_M, position_M = np.nonzero(~np.isnan(x_BK) & (np.arange(self._max_drafts) < judged_B[:, None]))
        slot_M, accepted_M = slots_B[block_M], position_M < accepted_B[block_M]
        chance_M = self._chances(slots_B, x_BK)[block_M, position_M]
        miss_M, weight_M = accepted_M - chance_M, np.maximum(chance_M * (1.0 - chance_M), _MIN_CURVATURE)
        terms = np.ones(len(slot_M)), x_BK[block_M, position_M], self._log_position_K[position_M]
        self._fit_shared(np.stack((*terms, self._temperature_S[slot_M]), axis=1), miss_M, weight_M, fade)
        self._fit_requests(slot_M, miss_M, weight_M, fade)
        bins_M = np.minimum((chance_M * _ERROR_BINS).astype(np.int64), _ERROR_BINS - 1)
        self._gaps_KE *= fade
        np.subtract.at(self._gaps_KE, (position_M, bins_M), miss_M)
        self._observed_K = fade * self._observed_K + np.bincount(position_M, minlength=self._max_drafts)
        self._x_STK[slots_B, places_B] = x_BK
        self._count(self._chances(slots_B, x_BK))
        self._publish()

    def _chances(self, slots_B: IntArray, x_BK: Doubles) -> Doubles:
        """Return the acceptance probabilities of drafts, given those before them; nan where none was made.
        `x_BK` may have further axes before these.
        """
        bias, slope, position, temperature = self._theta_P
        offset_B = self._request_S[slots_B] + temperature * self._temperature_S[slots_B]
        return 1.0 / (
            1.0 + np.exp(-(bias + slope * x_BK + position * self._log_position_K + offset_B[:, None]))
        )

    def _fit_shared(self, features_MP: Doubles, miss_M: Doubles, weight_M: Doubles, fade: float) -> None:
        """Make one Newton step on the decayed log-likelihood with its ridge penalty."""
        self._curvature_PP *= fade
        self._curvature_PP += (features_MP * weight_M[:, None]).T @ features_MP
        # At the last optimum the gradient of old observations balanced that of the ridge; part of it has
        # decayed.
        gradient_P = features_MP.T @ miss_M - (1.0 - fade) * RIDGE * (self._theta_P - self._prior_P)
        step_P = np.linalg.solve(self._curvature_PP + RIDGE * np.eye(len(gradient_P)), gradient_P)
        self._theta_P += np.clip(step_P, -_MAX_NEWTON_STEP, _MAX_NEWTON_STEP)
        self._theta_P[1] = max(self._theta_P[1], 0.0)  # a larger margin never lowers the probability

    def _fit_requests(self, slot_M: IntArray, miss_M: Doubles, weight_M: Doubles, fade: float) -> None:
        """Make the same Newton step for the requests' own offsets."""
        miss_S, weight_S = (np.bincount(slot_M, values, self.num_slots) for values in (miss_M, weight_M))
        fade_S = np.where(weight_S > 0.0, fade, 1.0)
        self._request_curvature_S = fade_S * self._request_curvature_S + weight_S
        gradient_S = miss_S - (1.0 - fade_S) * RIDGE * self._request_S
        self._request_S += np.clip(
            gradient_S / (self._request_curvature_S + RIDGE), -_MAX_NEWTON_STEP, _MAX_NEWTON_STEP
        )

    def _count(self, chances_BK: Doubles) -> None:
        """Add the probabilities of these blocks to the mean probabilities."""
        made_BK = ~np.isnan(chances_BK)
        survival_BK = np.cumprod(np.where(made_BK, chances_BK, 0.0), axis=1)
        reached_BK = np.hstack((np.ones((len(chances_BK), 1)), survival_BK[:, :-1])) * made_BK
        fade_K = np.where(made_BK.any(axis=0), math.exp(-len(chances_BK) / NUM_BLOCKS), 1.0)
        self._reached_K = fade_K * self._reached_K + reached_BK.sum(axis=0)
        self._accepted_K = fade_K * self._accepted_K + survival_BK.sum(axis=0)

    def _publish(self) -> None:
        bias, slope, position, _ = self._theta_P
        self.bias_K = (bias + position * self._log_position_K).astype(np.float32)
        self.slope_K = np.full(self._max_drafts, slope, dtype=np.float32)
        # Mean acceptance probabilities by position, given that all drafts before were accepted. A position
        # that few blocks reached is smoothed towards the one before it.
        chance, chances = self._first_chance, list[float]()
        for reached, accepted in zip(self._reached_K.tolist(), self._accepted_K.tolist(), strict=True):
            chance = (accepted + RIDGE * chance) / (reached + RIDGE)
            chances.append(chance)
        self._mean_K = np.array(chances)

    # Persistence.

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        counts = {"reached": self._reached_K, "accepted": self._accepted_K}
        arrays = {"theta": self._theta_P, "curvature": self._curvature_PP, **counts}
        return {name: array.tolist() for name, array in arrays.items()}

    def read(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned.

        Raises:
            ValueError: it is malformed, or for a drafter of another block size; nothing is changed.
        """
        shapes = {name: np.shape(value) for name, value in self.as_json().items()}
        try:
            arrays = {name: np.array(saved[name], dtype=np.float64) for name in shapes}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError("not a saved acceptance model") from error
        if any(arrays[name].shape != shape for name, shape in shapes.items()):
            raise ValueError("saved for another block size")
        if not all((np.abs(array) <= _MAX_SAVED).all() for array in arrays.values()):
            raise ValueError(f"not between {-_MAX_SAVED:g} and {_MAX_SAVED:g}")
        theta_P, curvature_PP, reached_K, accepted_K = arrays.values()
        # The ridge is added before the matrix is inverted; the tolerance is for rounding.
        if (
            not np.allclose(curvature_PP, curvature_PP.T)
            or np.linalg.eigvalsh(curvature_PP)[0] < -0.5 * RIDGE
        ):
            raise ValueError("the curvature is no sum of squares")
        if not ((accepted_K >= 0) & (accepted_K <= (1 + 1e-6) * reached_K)).all():
            raise ValueError("more drafts were accepted than reached")
        # The next texts may be different: it weighs no more than the blocks of one update.
        share = min(1.0, UPDATE_STEPS / max(float(reached_K[0]), 1.0))
        self._theta_P, self._curvature_PP = theta_P, share * curvature_PP
        self._reached_K, self._accepted_K = share * reached_K, share * accepted_K
        self._publish()
