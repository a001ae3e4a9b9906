"""Predicts the seconds of a step: of the drafter's pass, and of the rest (verification, sampling, host work).

Each is a `StepTimeRegression`, learned while the engine runs. The machine's phase is estimated from the rest
and also applied to the drafter's pass. The first slow passes with a given number of rows have less weight,
because libraries allocate and compile for them.

Pure; used by `draft_length_policy.py`. Legend: N rows, L draft lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..step.scheduler_output import FloatArray
from .draft_lengths import load_class
from .step_time_regression import Doubles, PassFeatures, StepTimeRegression

_UNKNOWN_DRAFTER = 0.5  # fraction of the target's pass, until a drafter's pass was measured
_FIRST_NOISE = 1.0  # of the first slow pass in a class of rows; that of the n-th is 1/n of it
_PROMPT_NOISE = 0.3  # the same with prompt rows, whose attention is quadratic
_LEAST_S = 1e-9


class StepLoad(NamedTuple):
    """The work of a step besides drafts.

    Attributes:
        num_requests: decoding requests, each with one row without drafts.
        prompt_rows: all other rows.
        context: context tokens, summed over all requests.
    """

    num_requests: int
    prompt_rows: int
    context: float


class StepCostModel:
    """Predicts the seconds of one engine's steps.

    Args:
        row_buckets: row counts to which passes that only decode are padded (`ExecutorInfo.row_buckets`).
    """

    def __init__(self, row_buckets: tuple[int, ...] | None = None) -> None:
        self._buckets = None if row_buckets is None else np.array(row_buckets, dtype=np.int64)
        self._rest, self._draft = StepTimeRegression(has_phase=True), StepTimeRegression()
        self._draft_until_measured = self._draft
        self._num_passes: Counter[int] = Counter()  # by class of rows
        self._last: tuple[StepLoad, FloatArray] | None = None  # cached result of `seconds_by_rows`

    def with_other_drafts(self) -> StepCostModel:
        """Return a model that shares all costs but those of drafting, for drafts made another way."""
        other = StepCostModel()
        other._buckets, other._rest = self._buckets, self._rest
        other._draft_until_measured = self._draft
        return other

    @property
    def has_measurements(self) -> bool:
        """Whether any step was measured, by this process or an earlier one."""
        return bool(self._rest)

    @property
    def were_loaded(self) -> bool:
        """Whether measurements of an earlier process were loaded."""
        return self._rest.was_loaded

    @property
    def has_measured_drafts(self) -> bool:
        return bool(self._draft)

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether passes are padded to fixed numbers of rows."""
        return self._buckets is not None

    def observe(
        self,
        load: StepLoad,
        num_drafts: int,
        draft_rows: int,
        draft_s: float,
        rest_s: float,
        num_drafting: int,
    ) -> None:
        """Learn from a completed step.

        Args:
            num_drafts: number of verified drafts.
            draft_rows, num_drafting: rows of the drafter's pass, and requests in it; 0 if there was none.
            draft_s, rest_s: seconds of the drafter's pass, and of the rest; 0 if nothing was measured.
        """
        if rest_s <= 0.0:
            return
        work = self._features(load, load.num_requests + num_drafts)
        size = load_class(int(work.rows))
        self._num_passes[size] += 1
        min_noise = max(_FIRST_NOISE / self._num_passes[size], _PROMPT_NOISE if load.prompt_rows else 0.0)
        self._rest.observe(work, rest_s, min_noise)
        if draft_rows:
            work = PassFeatures(draft_rows, num_drafting, 0, load.context)
            self._draft.observe(work, max(draft_s, _LEAST_S) / self._rest.phase, min_noise)

    def _features(self, load: StepLoad, num_rows: int) -> PassFeatures:
        rows = int(self.padded(np.array([num_rows]))[0])
        return PassFeatures(rows, load.num_requests, load.prompt_rows, load.context)

    def padded(self, rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that passes compute for these numbers of decoding rows."""
        if self._buckets is None:
            return rows_N
        places_N = np.minimum(np.searchsorted(self._buckets, rows_N), len(self._buckets) - 1)
        return np.maximum(self._buckets[places_N], rows_N)

    # Predictions.

    def changed(self) -> None:
        """Make `seconds_by_rows` include what was learned since the last call."""
        self._last = None

    def draft_s(self, context: float, draft_rows: int, num_drafting: int) -> float:
        if not draft_rows:
            return 0.0
        work = PassFeatures(draft_rows, num_drafting, 0, context)
        if known := self._draft or self._draft_until_measured:
            return self._rest.phase * known.predict(work).seconds
        return _UNKNOWN_DRAFTER * self._rest.predict(work).seconds

    def rest_s(self, load: StepLoad, max_drafts: int) -> Doubles:
        """Predict the seconds of the rest of steps with 0, 1, .., `max_drafts` drafts."""
        rows_N = self.padded(np.arange(load.num_requests, load.num_requests + max_drafts + 1))
        return self._rest.seconds_of_rows(rows_N.astype(np.float64), self._features(load, 0))

    def bounds_s(self, load: StepLoad, lengths: Sequence[int]) -> tuple[Doubles, Doubles]:
        """Return the lower and upper bound, one standard deviation from the prediction, of the seconds of
        steps without prompts in which all requests have drafts of these lengths (ascending): two arrays [L].
        """
        load, lengths_L = load._replace(prompt_rows=0), np.array(lengths)
        rows_L = load.num_requests * (1 + lengths_L)
        least_L, most_L = self._rest.bounds(self.padded(rows_L).astype(np.float64), self._features(load, 0))
        if known := self._draft or self._draft_until_measured:
            work = PassFeatures(0, load.num_requests, 0, load.context)
            draft_least_L, draft_most_L = known.bounds(rows_L.astype(np.float64), work)
        else:
            draft_least_L, draft_most_L = np.zeros_like(least_L), most_L / self._rest.phase
        phase_L = self._rest.phase * (lengths_L > 0)
        return least_L + phase_L * draft_least_L, most_L + phase_L * draft_most_L

    def seconds_by_rows(self, load: StepLoad, num_rows: int) -> FloatArray:
        """Predict the seconds of the target's pass by its rows, including prompt rows: fp32, more than
        `num_rows` values (`Trim.seconds_N`). Returns the same array until `changed` while the load is about
        the same.
        """
        same = self._last is not None and self._last[0][:2] == load[:2] and len(self._last[1]) > num_rows
        if self._last is None or not same:
            rows_N = np.maximum(np.arange((1 << num_rows.bit_length()) + 1.0) - load.prompt_rows, 0.0)
            work = self._features(load._replace(prompt_rows=0), 0)
            seconds_N = self._rest.seconds_of_rows(rows_N, work)
            self._last = load, seconds_N.astype(np.float32)
        return self._last[1]

    # Persistence.

    def reset(self) -> None:
        """Forget everything, as in a new process."""
        self._rest.become(StepTimeRegression(has_phase=True))
        self._draft.become(StepTimeRegression())

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            name: each.as_json(self._rest.phase)
            for name, each in (("rest", self._rest), ("draft", self._draft))
        }

    def read(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned.

        Raises:
            ValueError: it is malformed; nothing is changed.
        """
        found = StepTimeRegression(has_phase=True), StepTimeRegression()
        try:
            for regression, name in zip(found, ("rest", "draft"), strict=True):
                regression.read(saved[name])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("these are no costs of steps") from error
        for mine, theirs in zip((self._rest, self._draft), found, strict=True):
            mine.become(theirs)
