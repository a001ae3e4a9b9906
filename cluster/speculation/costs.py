"""What steps take: measured while the engine runs, of every step, whatever is in it.

A step's seconds are those of the drafter's pass and of all the rest. Each is learned as `step_times.py` has
it, and multiplied by what holds for all steps:

    phase     a machine's clocks change, others come and go. What a step takes longer than is usual for it is
              taken to hold for all steps, now: so plain steps, of which there are none while drafts are made,
              are weighed as they would be now, and not as they were when they were measured. The same step
              made again and again therefore tells of the phase, and hardly of itself.
    cutting   where drafts are cut a step takes longer than one of as many rows: to cut them takes time, and
              so does it that requests have different numbers of rows.

What a step tells is shared out by how little is known of each. Much slower than foreseen is likely a hiccup,
and so are the first steps of some number of rows, for which libraries prepare; what is quicker is believed.
What is learned can be kept between starts (`as_json`, `read`); where, `actors/kept_speculation.py` knows.
What was kept of a bad moment is a phase, and of a drafter that is not asked, or takes twice as long or half,
it is forgotten.

Pure; used by `policy.py` alone. Legend: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import FloatArray
from .step_times import Doubles, StepTimes, Work

_UNKNOWN_DRAFTER = 0.5  # of the target's pass
_PHASE_STEP, _CUTTING_STEP = 0.015, 0.002  # by which they change in a step, about
_PHASE_KEPT = 0.5  # how far off a phase may be that what was kept was measured in
_CUTTING = 0.1  # how much longer a step may take where drafts are cut
_FIRST_TIMES = (1.5, 0.7)  # noise of steps that are slow, with about as many rows as hardly any before
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_STEP = 0.1, 0.01, 0.3, 1 / 32
_HALF_WITHIN = 0.6745  # of a normal distribution's deviation
_HICCUP = 3.0  # deviations
_PROMPTS_NOISE = 0.3
_ALIKE = 0.4  # octaves
_OFF = 2.0  # times that the first drafts are off what was kept
_UNTRIED = 128  # steps: so long it is believed of what was kept that no drafts pay
_LEAST_S = 1e-9


class Load(NamedTuple):
    """What a step does beside verifying drafts, as far as it costs.

    Attributes:
        num_rows: of requests that decode, without drafts: as many as these.
        prompt_rows: all others.
        context: tokens that its requests look back on, together.
    """

    num_rows: int
    prompt_rows: int
    context: float


class _Noise:
    """How much steps differ that are alike; as part of their seconds."""

    def __init__(self) -> None:
        self._deviation = _NOISE

    def of(self, surprise: float) -> float:
        """Of a step that was off by so much: the slower, the likelier it is a hiccup."""
        return max(self._deviation, surprise / _HICCUP)

    def learn(self, surprise: float, deviation: float) -> None:
        """A step was off by so much, where so much was to be expected."""
        wider = abs(surprise) > _HALF_WITHIN * deviation
        noise = self._deviation * math.exp(_NOISE_STEP if wider else -_NOISE_STEP)
        self._deviation = min(max(noise, _LEAST_NOISE), _MOST_NOISE)


class _Factor:
    """By which seconds are multiplied, as a logarithm, and how well it is known."""

    def __init__(self, unknown: float, step: float) -> None:
        self.log, self.variance, self._renewed = 0.0, unknown**2, step**2

    def learn(self, surprise: float, total: float) -> None:
        """A step was off by so much, of which the variance was so much in all."""
        share = self.variance / total
        self.log += share * surprise
        self.variance = self.variance * (1.0 - share) + self._renewed


class Costs:
    """Of one engine.

    Args:
        buckets: rows of a decoding pass, where it takes as long as the next of these; see `ExecutorInfo`.
    """

    def __init__(self, buckets: tuple[int, ...] | None = None) -> None:
        self._buckets = None if buckets is None else np.array(buckets, dtype=np.int64)
        self._rest, self._draft = StepTimes(), StepTimes()
        self._draft_before = self._draft  # what is taken for `_draft` until that is known
        self._phase = _Factor(0.0, _PHASE_STEP)
        self._cutting = _Factor(_CUTTING, _CUTTING_STEP)
        self._noise, self._draft_noise = _Noise(), _Noise()
        self._times_seen: dict[int, int] = {}
        self._like: float | None = None  # rows of the last step, and how many were alike
        self._num_alike = 0
        self._num_untried = _UNTRIED  # steps since drafts were kept and not made
        self._settled = 0
        # Seconds by rows that were asked for last, and when what is known was settled: most ask the same.
        self._last: tuple[int, Load | None, FloatArray] = 0, None, np.zeros(0, np.float32)

    def with_other_drafts(self) -> Costs:
        """The same engine's, of steps that are drafted in another way."""
        other = Costs()
        other._buckets, other._rest, other._draft_before = self._buckets, self._rest, self._draft
        other._phase, other._noise, other._times_seen = self._phase, self._noise, self._times_seen
        return other

    @property
    def know_time(self) -> bool:
        """Whether any step has been measured, now or before the start."""
        return bool(self._rest)

    @property
    def know_drafts(self) -> bool:
        """Whether any draft has been."""
        return bool(self._draft)

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether passes have; see `buckets`."""
        return self._buckets is not None

    @property
    def cutting(self) -> float:
        """Part of a step that it takes longer where its drafts are cut, than one of as many rows."""
        return max(math.exp(self._cutting.log) - 1.0, 0.0)

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
        """A step has ended.

        Args:
            num_drafts: that were verified.
            draft_rows, num_drafting: of the drafter's pass, and requests in it; 0 if there was none.
            draft_s, rest_s: seconds of the drafter's pass, and of all else.
            cuts: whether drafts were cut.
            num_alike: steps for which this one stands.
        """
        if rest_s <= 0.0:
            return  # nothing is measured
        work = self._work(load, load.num_rows + num_drafts)
        if load.prompt_rows or not self._rest:
            self._rest.learn(work, rest_s / self._slower, _PROMPTS_NOISE)
        else:
            self._learn_rest(work, rest_s, cuts=cuts)
        if draft_rows:
            drafting = Work(draft_rows, num_drafting or load.num_rows, 0, load.context)
            self._learn_draft(drafting, max(draft_s, _LEAST_S) / self._slower)
            self._num_untried = _UNTRIED
        elif self._num_untried < _UNTRIED:
            self._num_untried += num_alike
            if self._num_untried >= _UNTRIED:
                self._draft.become(StepTimes())

    def _learn_rest(self, work: Work, seconds: float, *, cuts: bool) -> None:
        foreseen = self._rest.foresee(work)
        factors = (self._phase, self._cutting) if cuts else (self._phase,)
        surprise = math.log(seconds / foreseen.seconds) - sum(factor.log for factor in factors)
        unknown = sum(factor.variance for factor in factors) + self._noise_of(work, surprise) ** 2
        total = foreseen.doubt**2 + unknown
        self._noise.learn(surprise, math.sqrt(total))
        for factor in factors:
            factor.learn(surprise, total)
        seconds, noise = foreseen.seconds * math.exp(surprise), math.sqrt(unknown * self._again(work))
        self._rest.learn(work, seconds, noise, foreseen=foreseen)

    def _learn_draft(self, work: Work, seconds: float) -> None:
        """Its seconds as they are without the phase."""
        foreseen = self._draft.foresee(work) if self._draft else None
        surprise = math.log(seconds / foreseen.seconds) if foreseen else 0.0
        if abs(surprise) > math.log(_OFF) and self._num_untried < _UNTRIED:
            self._draft.become(StepTimes())  # it was kept of a bad moment
        if not foreseen or not self._draft:
            self._draft.learn(work, seconds, 0.0)
            return
        noise = self._draft_noise.of(surprise)
        self._draft_noise.learn(surprise, math.hypot(foreseen.doubt, noise))
        self._draft.learn(work, seconds, noise, foreseen=foreseen)

    def _noise_of(self, work: Work, surprise: float) -> float:
        """How much such a step may be off without any reason that could be learned."""
        place = round(4 * math.log2(max(work.rows, 1.0)))
        count = self._times_seen.get(place, 0)
        self._times_seen[place] = count + 1
        noise = self._noise.of(surprise)
        return max(noise, _FIRST_TIMES[count]) if surprise > 0.0 and count < len(_FIRST_TIMES) else noise

    def _again(self, work: Work) -> int:
        """How often about the same step has come without another between: their phase is one."""
        alike = self._like is not None and abs(math.log2(work.rows / self._like)) < _ALIKE
        self._num_alike = self._num_alike + 1 if alike else 1
        self._like = work.rows
        return self._num_alike

    def _work(self, load: Load, rows: int) -> Work:
        rounded = rows if self._buckets is None else int(self._rounded(np.array([rows]))[0])
        return Work(rounded, load.num_rows, load.prompt_rows, load.context)

    @property
    def _slower(self) -> float:
        return math.exp(self._phase.log)

    # What is asked.

    def settle(self) -> None:
        """From now on cuts are made by what is known now."""
        self._settled += 1

    def draft_s(self, context: float, draft_rows: int, num_drafting: int) -> float:
        """Of the drafter's pass, about. Where none is known it takes half as long as the target's."""
        if not draft_rows:
            return 0.0
        work = Work(draft_rows, num_drafting, 0, context)
        if known := self._draft or self._draft_before:
            return self._slower * known.foresee(work).seconds
        return self._slower * _UNKNOWN_DRAFTER * self._rest.foresee(work).seconds

    def bounds_s(self, load: Load, lengths: Sequence[int]) -> tuple[Doubles, Doubles]:
        """The least and the most seconds of steps in which all have so many drafts, of which there are more
        and more; without rows of prompts."""
        load, lengths_L = load._replace(prompt_rows=0), np.array(lengths)
        rows_L = load.num_rows * (1 + lengths_L)
        least_L, most_L = self._rest.bounds(self._rounded(rows_L).astype(np.float64), self._work(load, 0))
        if drafter := self._draft or self._draft_before:
            drafting = Work(0, load.num_rows, 0, load.context)
            draft_least_L, draft_most_L = drafter.bounds(rows_L.astype(np.float64), drafting)
        else:
            draft_least_L, draft_most_L = np.zeros_like(least_L), most_L
        drafts_L = lengths_L > 0
        return self._slower * (least_L + drafts_L * draft_least_L), self._slower * (
            most_L + drafts_L * draft_most_L
        )

    def rest_s(self, load: Load, most_drafts: int) -> Doubles:
        """Of all else, about, with 0, 1, .., `most_drafts` drafts."""
        rows_N = self._rounded(np.arange(load.num_rows, load.num_rows + most_drafts + 1))
        return self._slower * self._rest.seconds_of_rows(rows_N.astype(np.float64), self._work(load, 0))

    def pass_s(self, load: Load, num_rows: int) -> FloatArray:
        """Of the rows of a step, prompts' first, without what these and drafting take: fp32 [N], about, N
        above `num_rows`. The same array as long as nothing is settled anew and the load is about the same."""
        settled, last, seconds_N = self._last
        same = last is not None and (last.num_rows, last.prompt_rows) == (load.num_rows, load.prompt_rows)
        if settled != self._settled or not same or len(seconds_N) <= num_rows:
            room = 1 << num_rows.bit_length()
            rows_N = np.maximum(np.arange(room + 1.0) - load.prompt_rows, 0.0)
            alone = self._work(load._replace(prompt_rows=0), 0)
            seconds_N = (self._slower * self._rest.seconds_of_rows(rows_N, alone)).astype(np.float32)
            self._last = self._settled, load, seconds_N
        return seconds_N

    def rooms(self, load: Load, most_drafts: int) -> NDArray[np.int64]:
        """By number of drafts, how many rows the pass then has."""
        return self._rounded(np.arange(load.num_rows, load.num_rows + most_drafts + 1))

    def _rounded(self, rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._buckets is None:
            return rows_N
        places_N = np.minimum(np.searchsorted(self._buckets, rows_N), len(self._buckets) - 1)
        return np.maximum(self._buckets[places_N], rows_N)

    # Between starts.

    def forget(self) -> None:
        """Begin again as a new engine does."""
        for times in (self._rest, self._draft):
            times.become(StepTimes())
        self._phase.log = self._phase.variance = 0.0
        self._num_untried = _UNTRIED

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {"rest": self._rest.as_json(), "draft": self._draft.as_json()}

    def read(self, kept: Mapping[str, Any]) -> None:
        """Begin with what `as_json` gave; ValueError, with nothing changed, where it is something else."""
        found = StepTimes(), StepTimes()
        try:
            for times, name in zip(found, ("rest", "draft"), strict=True):
                times.read(kept[name])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("these are no costs of steps") from error
        for mine, theirs in zip((self._rest, self._draft), found, strict=True):
            mine.become(theirs)
        self._phase.variance, self._num_untried = _PHASE_KEPT**2, 0
