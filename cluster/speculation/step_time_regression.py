"""Predicts the seconds of one pass (the target's or the drafter's) by a piecewise linear regression.

    seconds = phase (a + b R + sum_i s_i |rows in segment i| + c C + d C N / R + e [P > 0] + f P)

with N rows of R decoding requests, C context tokens of all requests, and P prompt rows. Segments end at
powers of two, because rows may be free up to some number and cost more beyond it, or cost less the more there
are (experts). b is separate from the rows because four requests of one row take longer than one request of
four. No coefficient is negative.

The phase is the machine's present slowness: clocks change, and other processes start and stop. It changes
within some dozens of steps, the coefficients hardly ever. So the prediction for plain steps, which do not run
while drafts are made, follows the machine's present state rather than the time of their last measurement.

All parameters are estimated together by an extended Kalman filter (D. Simon, "Optimal State Estimation",
13.2): a random walk observed through each pass. Loads share coefficients, so a pass that never ran is
predicted too, with a standard deviation that says how well it is known. Exploration of draft lengths relies
on that.

A pass that is much slower than predicted is probably an interruption and has less weight. Used by
`step_cost_model.py`.

Legend: F coefficients and the phase's logarithm, K knots, N points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_KNOTS = np.concatenate(([1.0], 2.0 ** np.arange(1, 14)))  # rows where segments begin
_CONSTANT, _REQUESTS, _CONTEXT, _ATTENTION, _PROMPT, _PROMPT_ROWS = range(6)
_FIRST_SEGMENT = 6
_LAST_SEGMENT = _FIRST_SEGMENT + len(_KNOTS) - 1
_PHASE = _LAST_SEGMENT + 1
_NUM = _PHASE + 1

# The prior, in units of the first pass's seconds; a memory-bound GPU and a compute-bound CPU are within it.
_USUAL_CONTEXT = 1024.0  # tokens; the context of the first pass is used if it is larger
_ROW, _ROW_DEVIATION = 0.05, 0.10
_CONSTANT_DEVIATION, _CONTEXT_DEVIATION = 0.5, 0.3  # the latter for `_USUAL_CONTEXT`
_SEGMENT_CHANGE = 0.5  # deviation between successive segments, in `_ROW_DEVIATION`
_WALK = 1e-5  # of the prior's covariance, added at each step
_PHASE_WALK = 0.015  # standard deviation of the change of the phase's logarithm in a step
_LOADED, _LOADED_PHASE = 0.1, 0.3  # of the prior's covariance, and deviation of the phase, for loaded states
_FIRST_NOISE = 0.3  # standard deviation of the first pass's seconds, relative: it allocates and compiles
_NOISE, _MIN_NOISE, _MAX_NOISE = 0.1, 0.01, 0.3  # of later passes: initial, and bounds of the learned one
_NOISE_STEP = 1 / 32  # its change per pass: up if a surprise is above the median of a normal distribution
_MEDIAN = 0.6745
_OUTLIER = 3.0  # largest deviation of a slow pass: its noise is raised, then its seconds are cut
_MAX_DOUBT = 20.0  # keeps exp() finite
_LEAST = 1e-3  # lower bound of predictions, in units of the first pass's seconds


class PassFeatures(NamedTuple):
    """The work of a pass.

    Attributes:
        rows, requests: rows and number of decoding requests.
        prompt_rows: all other rows.
        context: context tokens, summed over all requests.
    """

    rows: float
    requests: float
    prompt_rows: float
    context: float


class Prediction(NamedTuple):
    """Prediction for one pass.

    Attributes:
        seconds: expected seconds.
        doubt: standard deviation, relative to `seconds`.
        features_F: derivatives of the seconds with respect to the state.
        covariance_F: covariance of the state with the predicted seconds.
    """

    seconds: float
    doubt: float
    features_F: Doubles
    covariance_F: Doubles


class StepTimeRegression:
    """Regression for one kind of pass of one engine. False until a pass was observed.

    Args:
        has_phase: whether the phase is estimated; otherwise it is 1.

    Attributes:
        was_loaded: it started from what an earlier process saved.
    """

    def __init__(self, *, has_phase: bool = False) -> None:
        self._has_phase = has_phase
        self.was_loaded = False
        self._noise = _NOISE
        self._theta_F: Doubles = np.zeros(_NUM)
        self._covariance_FF: Doubles = np.zeros((_NUM, _NUM))
        self._walk_FF: Doubles = np.zeros((_NUM, _NUM))
        self._first_s = 0.0
        self._saw_only_prompts = True

    def __bool__(self) -> bool:
        return bool(self._first_s > 0.0)

    @property
    def phase(self) -> float:
        return math.exp(float(self._theta_F[_PHASE]))

    def predict(self, work: PassFeatures) -> Prediction:
        """Predict the seconds of a pass. At least one pass must have been observed."""
        features_F = _features(work)
        seconds = self.phase * max(float(features_F @ self._theta_F), _LEAST * self._first_s)
        features_F *= self.phase
        features_F[_PHASE] = 0.0 if work.prompt_rows else seconds  # prompts vary too much for the phase
        covariance_F = self._covariance_FF @ features_F
        variance = max(float(features_F @ covariance_F), 0.0)
        return Prediction(seconds, math.sqrt(variance) / seconds, features_F, covariance_F)

    def seconds_of_rows(self, rows_N: Doubles, work: PassFeatures) -> Doubles:
        """Predict the seconds of passes with these numbers of rows instead of `work.rows`."""
        theta_F = self._theta_F
        attention = theta_F[_ATTENTION] * work.context / max(work.requests, 1.0)
        slopes_K = theta_F[_FIRST_SEGMENT:_LAST_SEGMENT]
        knots_K = np.concatenate(([0.0], np.cumsum(slopes_K * np.diff(_KNOTS))))
        seconds_N = _features(work._replace(rows=0.0)) @ theta_F + attention * rows_N
        seconds_N += np.interp(rows_N, _KNOTS, knots_K)
        seconds_N += theta_F[_LAST_SEGMENT] * np.maximum(rows_N - _KNOTS[-1], 0.0)
        return self.phase * np.maximum(seconds_N, _LEAST * self._first_s)

    def bounds(self, rows_N: Doubles, work: PassFeatures) -> tuple[Doubles, Doubles]:
        """Return the lower and upper bound, one standard deviation from the prediction, of the seconds of
        passes with these rows (ascending). They do not decrease with the rows, and grow at most in proportion
        to them.
        """
        features_NF = np.stack([_features(work._replace(rows=rows)) for rows in rows_N.tolist()])
        seconds_N = self.phase * np.maximum(features_NF @ self._theta_F, _LEAST * self._first_s)
        features_NF *= self.phase
        features_NF[:, _PHASE] = seconds_N
        variance_N = np.einsum("nf,fg,ng->n", features_NF, self._covariance_FF, features_NF)
        doubt_N = np.exp(np.minimum(np.sqrt(np.maximum(variance_N, 0.0)) / seconds_N, _MAX_DOUBT))
        least_N = np.maximum.accumulate(seconds_N / doubt_N)
        return least_N, rows_N * np.minimum.accumulate(seconds_N * doubt_N / rows_N)

    def observe(self, work: PassFeatures, seconds: float, min_noise: float = 0.0) -> None:
        """Update the state with one pass.

        Args:
            min_noise: minimum relative standard deviation of its seconds if it was slower than predicted.
        """
        is_first = not self or (self._saw_only_prompts and not work.prompt_rows)
        if is_first:
            self._begin(work, seconds)
        predicted = self.predict(work)
        surprise = math.log(seconds / predicted.seconds)
        noise = _FIRST_NOISE if is_first else self._noise
        if surprise > 0.0 and not is_first:
            noise = max(noise, min_noise, surprise / _OUTLIER)
        deviation = math.hypot(predicted.doubt, noise)
        self._learn_noise(abs(surprise) > _MEDIAN * deviation)
        seconds = min(seconds, predicted.seconds * (1.0 + _OUTLIER * deviation))
        features_F, covariance_F, expected_s = predicted.features_F, predicted.covariance_F, predicted.seconds
        theta_F, variance = self._theta_F, (noise * predicted.seconds) ** 2
        while True:
            gain_F = covariance_F / (float(features_F @ covariance_F) + variance)
            new_F = theta_F + gain_F * (seconds - expected_s)
            kept_F = (new_F >= 0.0) | (features_F == 0.0)
            kept_F[_PHASE] = True
            if kept_F.all():
                break
            # A coefficient that would become negative is set to zero; the update is distributed over the
            # others.
            self._decorrelate(kept_F)
            features_F, theta_F = features_F * kept_F, theta_F * kept_F
            expected_s = float(features_F[:_PHASE] @ theta_F[:_PHASE])
            covariance_F = self._covariance_FF @ features_F
        np.maximum(new_F[:_PHASE], 0.0, out=new_F[:_PHASE])
        self._theta_F = new_F
        self._covariance_FF = self._covariance_FF - gain_F[:, None] * covariance_F + self._walk_FF

    def _learn_noise(self, is_wide: bool) -> None:
        noise = self._noise * math.exp(_NOISE_STEP if is_wide else -_NOISE_STEP)
        self._noise = min(max(noise, _MIN_NOISE), _MAX_NOISE)

    def _decorrelate(self, kept_F: NDArray[np.bool_]) -> None:
        """Drop the covariances of all coefficients but the kept ones; variances are unchanged."""
        both_FF = np.outer(kept_F, kept_F)
        np.fill_diagonal(both_FF, True)
        self._covariance_FF *= both_FF

    def _begin(self, work: PassFeatures, seconds: float) -> None:
        """Scale the prior to the first pass."""
        theta_F, covariance_FF = _prior(max(work.context, _USUAL_CONTEXT))
        scale = seconds / float(_features(work) @ theta_F)
        self._theta_F, self._covariance_FF = scale * theta_F, scale**2 * covariance_FF
        self._covariance_FF[_CONSTANT, _CONSTANT] = (_CONSTANT_DEVIATION * seconds) ** 2
        self._first_s, self._saw_only_prompts = seconds, work.prompt_rows > 0
        self._set_walk(self._covariance_FF, 0.0)

    def _set_walk(self, prior_FF: Doubles, phase_deviation: float) -> None:
        self._walk_FF = _WALK * prior_FF
        if self._has_phase:
            self._covariance_FF[_PHASE, _PHASE] = phase_deviation**2
            self._walk_FF[_PHASE, _PHASE] = _PHASE_WALK**2

    # Persistence.

    def as_json(self, factor: float) -> dict[str, Any]:  # Any: JSON
        """Return the coefficients and the first pass's seconds, times a factor."""
        return {"seconds": (factor * self._theta_F[:_PHASE]).tolist(), "first_s": factor * self._first_s}

    def read(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned. Raises ValueError, TypeError, KeyError or AttributeError."""
        theta_F, first_s = np.array([*saved["seconds"], 0.0], dtype=np.float64), float(saved["first_s"])
        if theta_F.shape != (_NUM,) or not (np.isfinite(theta_F).all() and (theta_F >= 0).all()):
            raise ValueError("coefficients must be numbers, not below 0")
        if not (math.isfinite(first_s) and first_s > 0):
            raise ValueError("seconds must be above 0")
        prior_FF = first_s**2 * _prior(_USUAL_CONTEXT)[1]
        self._theta_F, self._first_s, self._saw_only_prompts = theta_F, first_s, False
        self._covariance_FF = _LOADED * prior_FF
        self._set_walk(prior_FF, _LOADED_PHASE)
        self.was_loaded = True

    def become(self, other: StepTimeRegression) -> None:
        """Copy the state of another regression into this object, which other objects share."""
        self._theta_F, self._covariance_FF = other._theta_F.copy(), other._covariance_FF.copy()
        self._walk_FF, self._first_s, self._noise = other._walk_FF.copy(), other._first_s, other._noise
        self._saw_only_prompts, self.was_loaded = other._saw_only_prompts, other.was_loaded


def _features(work: PassFeatures) -> Doubles:
    features_F = np.zeros(_NUM)
    if work.requests:
        features_F[_CONSTANT] = 1.0
        features_F[_REQUESTS] = work.requests
        features_F[_ATTENTION] = work.context * work.rows / work.requests
        features_F[_FIRST_SEGMENT:_LAST_SEGMENT] = np.clip(work.rows, _KNOTS[:-1], _KNOTS[1:]) - _KNOTS[:-1]
        features_F[_LAST_SEGMENT] = max(work.rows - _KNOTS[-1], 0.0)
    features_F[_CONTEXT] = work.context
    if work.prompt_rows:
        features_F[_PROMPT], features_F[_PROMPT_ROWS] = 1.0, work.prompt_rows
    return features_F


def _prior(usual_context: float) -> tuple[Doubles, Doubles]:
    """Return the prior coefficients and their covariance, for a first pass of one second."""
    theta_F, deviation_F = np.zeros(_NUM), np.zeros(_NUM)
    theta_F[_CONSTANT], deviation_F[_CONSTANT] = 1.0 - _ROW, _CONSTANT_DEVIATION
    theta_F[_REQUESTS], deviation_F[_REQUESTS] = _ROW, _ROW_DEVIATION
    deviation_F[_CONTEXT] = deviation_F[_ATTENTION] = _CONTEXT_DEVIATION / usual_context
    deviation_F[_ATTENTION] *= _ROW_DEVIATION
    theta_F[_PROMPT_ROWS], deviation_F[_PROMPT], deviation_F[_PROMPT_ROWS] = _ROW, 1.0, _ROW_DEVIATION
    covariance_FF = np.diag(deviation_F**2)
    theta_F[_FIRST_SEGMENT:_PHASE] = _ROW
    # The cost per row changes little between successive segments: a random walk over segments.
    walk = np.arange(len(_KNOTS))
    shared = 1.0 + _SEGMENT_CHANGE**2 * np.minimum(walk[:, None], walk[None, :])
    covariance_FF[_FIRST_SEGMENT:_PHASE, _FIRST_SEGMENT:_PHASE] = _ROW_DEVIATION**2 * shared
    return theta_F, covariance_FF
