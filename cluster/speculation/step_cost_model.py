"""Predicts the seconds of a step: of the drafter's pass, and of the rest (verification, sampling, host work).

Both are linear regressions (`PassRegression`), learned while the engine runs:

    seconds = phase (a + b R + sum_i s_i |rows in segment i| + c C + d C N / R + e [P > 0] + f P)

with N rows of R decoding requests, C context tokens of all requests, and P prompt rows. Segments end at
powers of two, because rows may be free up to some number and cost more beyond it, or cost less the more there
are (experts). b is separate because four requests of one row take longer than one request of four. No
coefficient is negative. The phase is the machine's present slowness, which changes within dozens of steps. It
is estimated from the rest and applied to the drafter's pass too, so predictions for plain steps follow the
machine while drafts are made.

All parameters of a regression are estimated together by an extended Kalman filter (D. Simon, "Optimal State
Estimation", 13.2): a random walk observed through each pass. Loads share coefficients, so a pass that never
ran is predicted too, with a standard deviation, on which trials of draft lengths and prompt rows rely.

Legend: M passes, F coefficients and the phase's logarithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..step.scheduler_output import FloatArray

Doubles = NDArray[np.float64]
Amounts = float | NDArray[Any]  # of one pass, or of M  # Any: integers or floats

_KNOTS = 2.0 ** np.arange(14)  # rows where segments begin, up to 8,192, the rows of the largest usual step
_WIDTHS = np.append(np.diff(_KNOTS), np.inf)
_CONSTANT, _REQUESTS, _CONTEXT, _ATTENTION, _PROMPT, _PROMPT_ROWS, _FIRST_SEGMENT = range(7)
_PHASE = _FIRST_SEGMENT + len(_KNOTS)

# The prior, in units of the first pass's seconds; a memory-bound GPU and a compute-bound CPU are within it.
_ROW = 0.1  # mean and deviation of a row's part, and of a request's
# Of the constant, the context, and between successive segments in units of `_ROW`. For segments alone 0.25,
# 1 and 2 leave the worst H200 cell at 0.923, 0.874 and 0.718 of the best instead of 0.971.
_DEVIATION = 0.5
_USUAL_CONTEXT = 1024.0  # tokens that may take `_DEVIATION`; the first pass's context if it is larger
_WALK = 1e-5  # of the prior's covariance, added at each step; not tuned, as costs change in no simulated cell
# Standard deviation of the change of the phase's logarithm in a step. Not tuned; `_NOISE` divided by it is
# the number of steps in which the phase follows the machine.
_PHASE_WALK = 0.03
_NOISE = (
    0.1  # relative deviation of a pass's seconds; with 0.05 two of 60 simulated cells stay at 0.4 of the best
)
# Largest deviation of a slow pass that is learned. Not tuned; without a limit the mean of 60 simulated cells
# falls from 1.0150 to 1.0103 of the best (docs/measurements.md).
_OUTLIER = 3.0
# Most decoding rows of a step over those of the largest step before; prompt rows over those of the largest
# chunk. Without a limit, costs of one request's steps are extrapolated to all drafts of 64: the first 150
# tokens of a cell then have 0.8 of plain decoding's speed; with 4, another cell stays at 0.926 of the best.
MAX_GROWTH = 8
_MAX_SAVED_S = 3600.0  # upper bound of saved seconds, which another program may have written
MIN_S = 1e-9  # lower bound of any pass, which keeps logarithms and ratios finite


class StepLoad(NamedTuple):
    """The work of a step besides drafts; in predictions arrays [M] or numbers."""

    num_requests: Amounts  # decoding requests, each with one row without drafts
    prompt_rows: Amounts  # all other rows
    context: Amounts  # tokens, summed over all requests
    is_half: bool = False  # drafts are made beside another half's pass, so only a part is waited for

    @property
    def size(self) -> int:
        """The class of the number of requests, which must be a number (`load_class`)."""
        return load_class(int(self.num_requests))


def load_class(num_requests: int) -> int:
    """Return the class of a number of requests: one class each up to 8, then classes about a fifth wide."""
    return round(4 * math.log2(max(num_requests, 1)))


class PassRegression:
    """Regression for one kind of pass, with or without a phase; false until a pass was observed."""

    def __init__(self, *, has_phase: bool = False) -> None:
        self._has_phase = has_phase
        self._theta_F: Doubles = np.zeros(_PHASE + 1)
        self._covariance_FF = self._walk_FF = np.zeros((_PHASE + 1, _PHASE + 1))
        self._first_s = 0.0
        self._saw_only_prompts = True

    def __bool__(self) -> bool:
        return bool(self._first_s > 0.0)

    @property
    def phase(self) -> float:
        return math.exp(float(self._theta_F[_PHASE]))

    def predict(self, rows_M: Amounts, load: StepLoad) -> tuple[Doubles, Doubles]:
        """Return the seconds of passes with these decoding rows and their relative standard deviation [M].

        At least one pass must have been observed.
        """
        slopes_MF = _features(rows_M, load)
        seconds_M = self.phase * np.maximum(slopes_MF @ self._theta_F, MIN_S)
        slopes_MF *= self.phase
        # Seconds of prompts vary too much for the phase.
        slopes_MF[:, _PHASE] = seconds_M * (slopes_MF[:, _PROMPT_ROWS] == 0.0)
        variance_M = np.einsum("mf,mf->m", slopes_MF @ self._covariance_FF, slopes_MF)
        return seconds_M, np.sqrt(np.maximum(variance_M, 0.0)) / seconds_M

    def observe(self, rows: float, load: StepLoad, seconds: float, slow_noise: float) -> None:
        """Update the state with one pass; `slow_noise`: minimum relative deviation if it was slow."""
        if not self or (self._saw_only_prompts and not load.prompt_rows):
            self._begin(rows, load, seconds)
        slopes_F = self.phase * _features(rows, load)[0]
        expected_s = max(float(slopes_F[:_PHASE] @ self._theta_F[:_PHASE]), self.phase * MIN_S)
        slopes_F[_PHASE] = 0.0 if load.prompt_rows else expected_s
        covariance_F = self._covariance_FF @ slopes_F
        variance = float(slopes_F @ covariance_F)
        noise = _NOISE
        if seconds > expected_s:
            noise = max(noise, slow_noise, math.log(seconds / expected_s) / _OUTLIER)
            doubt = math.sqrt(max(variance, 0.0)) / expected_s
            seconds = min(seconds, expected_s * (1.0 + _OUTLIER * math.hypot(doubt, noise)))
        theta_F, noise_variance = self._theta_F, (noise * expected_s) ** 2
        while True:
            gain_F = covariance_F / (variance + noise_variance)
            new_F = theta_F + gain_F * (seconds - expected_s)
            if new_F[:_PHASE].min() >= 0.0:
                break
            kept_F = (new_F >= 0.0) | (slopes_F == 0.0)
            kept_F[_PHASE] = True
            if kept_F.all():
                break
            # A coefficient that would become negative is set to zero, without its covariances; the update is
            # distributed over the others.
            together_FF = np.outer(kept_F, kept_F) | np.eye(_PHASE + 1, dtype=bool)
            self._covariance_FF = self._covariance_FF * together_FF
            slopes_F, theta_F = slopes_F * kept_F, theta_F * kept_F
            expected_s = float(slopes_F[:_PHASE] @ theta_F[:_PHASE])
            covariance_F = self._covariance_FF @ slopes_F
            variance = float(slopes_F @ covariance_F)
        np.maximum(new_F[:_PHASE], 0.0, out=new_F[:_PHASE])
        self._theta_F = new_F
        self._covariance_FF = self._covariance_FF - gain_F[:, None] * covariance_F + self._walk_FF

    def _begin(self, rows: float, load: StepLoad, seconds: float) -> None:
        """Scale the prior so that it predicts the first pass's seconds."""
        context = max(float(np.max(load.context)), _USUAL_CONTEXT)
        # What the pass takes by the prior's coefficients, in their units.
        parts = float(_features(rows, load)[0] @ _prior(context, 1.0)[0])
        theta_F, covariance_FF = _prior(context, parts)
        scale = seconds / parts
        self._theta_F, self._first_s = scale * theta_F, seconds
        self._saw_only_prompts = bool(load.prompt_rows)
        covariance_FF *= scale**2
        covariance_FF[_CONSTANT, _CONSTANT] = (_DEVIATION * seconds) ** 2
        self._doubt(covariance_FF, 0.0)

    def _doubt(self, covariance_FF: Doubles, phase_deviation: float) -> None:
        """Set the covariance of the coefficients, and the covariance that each later pass adds to it."""
        self._covariance_FF, self._walk_FF = covariance_FF, _WALK * covariance_FF
        if self._has_phase:
            self._covariance_FF[_PHASE, _PHASE] = phase_deviation**2
            self._walk_FF[_PHASE, _PHASE] = _PHASE_WALK**2

    def as_json(self, factor: float) -> dict[str, Any]:  # Any: JSON
        """Return the coefficients and the first pass's seconds, times a factor."""
        return {"seconds": (factor * self._theta_F[:_PHASE]).tolist(), "first_s": factor * self._first_s}

    def read(self, saved: Mapping[str, Any]) -> PassRegression:
        """Start from what `as_json` returned. Raises ValueError, TypeError, KeyError or AttributeError."""
        theta_F, first_s = np.array([*saved["seconds"], 0.0], dtype=np.float64), float(saved["first_s"])
        if theta_F.shape != self._theta_F.shape or not ((theta_F >= 0) & (theta_F <= _MAX_SAVED_S)).all():
            raise ValueError(f"coefficients must be numbers from 0 to {_MAX_SAVED_S:g}")
        if not MIN_S <= first_s <= _MAX_SAVED_S:
            raise ValueError(f"seconds must be from {MIN_S:g} to {_MAX_SAVED_S:g}")
        self._theta_F, self._first_s = theta_F, first_s
        self._saw_only_prompts = False
        self._doubt(first_s**2 * _prior(_USUAL_CONTEXT, 1.0)[1], _DEVIATION)
        return self


def _features(rows_M: Amounts, load: StepLoad) -> Doubles:
    """Return the derivatives of the seconds of passes with respect to the coefficients, [M, F]."""
    requests, prompts, context, _ = load
    features_MF = np.zeros((np.broadcast(rows_M, requests, prompts, context).size, _PHASE + 1))
    features_MF[:, _CONSTANT], features_MF[:, _REQUESTS] = np.greater(requests, 0), requests
    features_MF[:, _CONTEXT] = context
    features_MF[:, _ATTENTION] = context * rows_M / np.maximum(requests, 1)
    features_MF[:, _PROMPT], features_MF[:, _PROMPT_ROWS] = np.greater(prompts, 0), prompts
    beyond_MK = np.maximum(np.subtract.outer(rows_M, _KNOTS), 0.0)
    np.minimum(beyond_MK, _WIDTHS, out=features_MF[:, _FIRST_SEGMENT:_PHASE])
    return features_MF


def _prior(usual_context: float, first: float) -> tuple[Doubles, Doubles]:
    """Return the prior coefficients and their covariance, in units in which the first pass takes `first`."""
    theta_F, deviation_F = np.full(_PHASE + 1, _ROW), np.full(_PHASE + 1, _ROW)
    theta_F[[_CONSTANT, _CONTEXT, _ATTENTION, _PROMPT, _PHASE]] = 1.0 - _ROW, 0.0, 0.0, 0.0, 0.0
    deviation_F[[_CONSTANT, _CONTEXT]] = _DEVIATION, _DEVIATION / usual_context
    deviation_F[[_ATTENTION, _PROMPT, _PHASE]] = _ROW * _DEVIATION / usual_context, 1.0, 0.0
    covariance_FF = np.diag(deviation_F**2)
    # The cost per row changes little between successive segments: a random walk over segments. Beyond many
    # rows a further one hardly costs more than its share of the first pass would be.
    steps_K = _DEVIATION * np.minimum(1.0, first / (_ROW * _KNOTS))
    walk = np.cumsum(np.append(0.0, steps_K[1:] ** 2))
    shared = 1.0 + np.minimum(walk[:, None], walk[None, :])
    covariance_FF[_FIRST_SEGMENT:_PHASE, _FIRST_SEGMENT:_PHASE] = _ROW**2 * shared
    return theta_F, covariance_FF


class StepCostModel:
    """Predicts the seconds of one engine's steps.

    Args:
        row_buckets: row counts to which passes that only decode are padded (`ExecutorInfo.row_buckets`).
    """

    def __init__(self, row_buckets: tuple[int, ...] | None = None) -> None:
        self.has_fixed_sizes = row_buckets is not None
        self._buckets = np.array(row_buckets or (), dtype=np.int64)
        self._num_passes: Counter[int] = Counter()  # by class of rows
        self._last: tuple[StepLoad, FloatArray] | None = None  # cached result of `seconds_by_rows`
        self.reset()

    def reset(self) -> None:
        """Forget everything, as in a new process."""
        self.known_at_start = False  # costs of drafting steps preceded the first request
        self.most_rows = 0.0  # decoding rows of the largest step; infinite with an earlier process's costs
        self._non_draft = PassRegression(has_phase=True)
        self._drafts = {is_half: PassRegression() for is_half in (False, True)}

    @property
    def has_measurements(self) -> bool:
        """Whether any step was measured, by this process or an earlier one."""
        return bool(self._non_draft)

    def end_warm_up(self) -> None:
        """Treat the steps so far as measured before the first request."""
        self.known_at_start = self.has_measured_drafts

    @property
    def has_measured_drafts(self) -> bool:
        return bool(self._drafts[False])

    def observe(
        self,
        load: StepLoad,
        num_drafts: int,
        draft_rows: int,
        draft_s: float,
        non_draft_s: float,
        num_drafting: int,
        *,
        is_change: bool = False,
    ) -> None:
        """Learn from a completed step.

        Args:
            num_drafts: number of verified drafts.
            draft_rows, num_drafting: rows of the drafter's pass, and requests in it; 0 if there was none.
            draft_s: seconds of the drafter's pass and of writing its context.
            non_draft_s: seconds of the rest; 0 if nothing was measured.
            is_change: the step before had another draft length.
        """
        if non_draft_s <= 0.0:
            return
        rows = self.padded(np.add(load.num_requests, num_drafts))
        size = load_class(int(rows))
        self._num_passes[size] += 1
        self.most_rows = max(self.most_rows, float(rows))
        # Libraries allocate and compile for first passes. A slow one after another length had cold caches
        # (docs/measurements.md): twice the usual deviation.
        slow_noise = max(1.0 / self._num_passes[size], 2 * _NOISE * is_change)
        self._non_draft.observe(float(rows), load, non_draft_s, slow_noise)
        if draft_rows:
            drafting = StepLoad(num_drafting, 0, load.context)
            seconds = max(draft_s, MIN_S) / self._non_draft.phase
            self._drafts[load.is_half].observe(draft_rows, drafting, seconds, slow_noise)

    def padded(self, rows: Amounts) -> NDArray[np.int64]:
        """Return the rows that passes compute for these numbers of decoding rows."""
        rows = np.asarray(rows)
        if not self.has_fixed_sizes:
            return rows
        places = np.minimum(np.searchsorted(self._buckets, rows), len(self._buckets) - 1)
        return np.maximum(self._buckets[places], rows)

    # Predictions.

    def changed(self) -> None:
        """Make `seconds_by_rows` include what was learned since the last call."""
        self._last = None

    def non_draft_s(self, load: StepLoad, max_drafts: int) -> Doubles:
        """Predict the seconds of the rest of steps with 0, 1, .., `max_drafts` drafts."""
        rows_M = np.add(load.num_requests, np.arange(max_drafts + 1))
        return self._non_draft.predict(self.padded(rows_M), load)[0]

    def step_s(self, load: StepLoad, lengths: Amounts | Sequence[int]) -> Doubles:
        """Predict the seconds of steps in which all decoding requests have drafts of these lengths [M]."""
        return self.bounds_s(load, lengths)[0]

    def draft_s(self, load: StepLoad, lengths: Amounts | Sequence[int]) -> Doubles:
        """Predict the seconds of drafting if all requests have drafts of these lengths [M]."""
        return self._drafting(load, lengths)[0]

    def _drafting(self, load: StepLoad, lengths: Amounts | Sequence[int]) -> tuple[Doubles, Doubles]:
        """Return the prediction and its lower bound."""
        drafting = load._replace(prompt_rows=0)
        rows_M = np.multiply(load.num_requests, np.add(lengths, 1))
        makes_M = self._non_draft.phase * (np.asarray(lengths) > 0)
        if known := self._drafts[load.is_half] or self._drafts[False]:
            seconds_M, doubt_M = known.predict(rows_M, drafting)
            seconds_M = makes_M * seconds_M
            return seconds_M, seconds_M / (1.0 + doubt_M)
        # Until a drafter's pass is measured, it is expected to take as long as the target's at most.
        rest_M = self._non_draft.predict(self.padded(rows_M), drafting)[0] * makes_M / self._non_draft.phase
        return rest_M, 0.0 * rest_M

    def bounds_s(self, load: StepLoad, lengths: Amounts | Sequence[int]) -> tuple[Doubles, Doubles]:
        """Return `step_s` and its lower bound, one standard deviation below: two arrays [M]."""
        rows_M = np.multiply(load.num_requests, np.add(lengths, 1))
        seconds_M, doubt_M = self._non_draft.predict(self.padded(rows_M), load)
        draft_s_M, least_draft_s_M = self._drafting(load, lengths)
        return seconds_M + draft_s_M, seconds_M / (1.0 + doubt_M) + least_draft_s_M

    def seconds_by_rows(self, load: StepLoad, num_rows: int) -> FloatArray:
        """Predict the seconds of the target's pass by its rows, including prompt rows: fp32, more than
        `num_rows` values (`Trim.seconds_N`). Returns the same array until `changed` while the load is about
        the same.
        """
        same = self._last is not None and self._last[0][:2] == load[:2] and len(self._last[1]) > num_rows
        if self._last is None or not same:
            rows_N = np.maximum(np.arange((1 << num_rows.bit_length()) + 1.0) - load.prompt_rows, 0.0)
            seconds_N = self._non_draft.predict(rows_N, load._replace(prompt_rows=0))[0]
            self._last = load, seconds_N.astype(np.float32)
        return self._last[1]

    # Persistence.

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        saved = ("rest", self._non_draft), ("draft", self._drafts[False])
        return {name: regression.as_json(self._non_draft.phase) for name, regression in saved}

    def read(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned.

        Raises:
            ValueError: it is malformed; nothing is changed.
        """
        try:
            rest = PassRegression(has_phase=True).read(saved["rest"])
            draft = PassRegression().read(saved["draft"])
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("these are no costs of steps") from error
        self._non_draft, self._drafts[False], self.known_at_start = rest, draft, True
        self.most_rows = math.inf
