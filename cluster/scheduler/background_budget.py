"""Decides how much background work joins a step: all of it in an idle engine, little next to online requests.

Next to online requests, background work may take a small share of the engine's time (`_SHARE`). The share is
saved while online requests decode alone, and spent by the additional time of steps with background work; a
negative balance is a debt that is saved up again. So the share holds however well costs were predicted. Cheap
work joins first: on a GPU, where decoding is memory-bound, more decoding requests cost next to nothing and
join every step, while a prompt chunk joins occasionally; on a CPU, where each row costs, one request joins
once in several steps.

Costs are measured relative to the preceding steps with online requests alone: by kind of work, by amount in
powers of two, and by number of online requests. An unmeasured amount is assumed to cost as much as the next
smaller one, and the smallest a whole step. Nothing joins before the online step itself is measured, or if
online requests do not all decode with the same draft length. Used by `step_controller.py`; does not access
sequences.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

_SHARE = 0.03  # of the time of online requests' decoding
_CHEAP = 0.05  # fraction of a step: more work may join while it costs less than this
_MAX_SAVED, _MAX_DEBT = 1.5, 4.0  # steps
_NUM_TIMES, _MIN_TIMES = 5, 3  # measurements whose median is used, and their minimum number
_MEASURE_EVERY = 16  # joined steps before one with online requests alone
_GROW_EVERY = 64  # joined steps before one with the next larger amount
_CHUNK = 16  # prompt rows, the unit of prompts
_SHORT_STEPS, _SHORT_S = 4.0, 0.05  # bound of a step without online requests: in their steps; if quiet


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """The background work of one step.

    Attributes:
        num_decoding: maximum number of decoding requests.
        prompt_rows: maximum number of prompt rows.
    """

    num_decoding: int
    prompt_rows: int


NOTHING = BackgroundWork(0, 0)


@dataclass(slots=True)
class _AmountCosts:
    """Costs of one kind of work, relative to a step; key i covers up to 2**i units."""

    costs: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque[float](maxlen=_NUM_TIMES))
    )
    num_joined: int = 0

    def observe(self, units: float, cost: float) -> None:
        self.costs[_power(units)].append(cost)
        self.num_joined += 1

    def cost(self, units: float) -> float:
        return self._up_to(_power(units))[-1]

    def affordable(self, units: float, saved: float) -> tuple[float, float]:
        """Return how many of these units may join at the cost of `saved` steps, and their cost."""
        if units <= 0:
            return 0.0, 0.0
        costs = self._up_to(_power(units))
        num_fitting = bisect_right(costs, min(max(_CHEAP, costs[0]), saved))
        if num_fitting == 0:
            return 0.0, 0.0
        if self.num_joined % _GROW_EVERY == _GROW_EVERY - 1:
            num_fitting = min(num_fitting + 1, len(costs))
        return min(units, 2.0 ** (num_fitting - 1)), costs[num_fitting - 1]

    def _up_to(self, power: int) -> list[float]:
        """Return the costs by power of two up to this amount: twice the work costs once to twice as much."""
        costs: list[float] = []
        for measured in (self.costs[i] for i in range(power + 1)):
            least, most = (costs[-1], 2 * costs[-1]) if costs else (_CHEAP / 5, _MAX_SAVED)
            unknown = least if costs else 1.0
            is_known = len(measured) >= _MIN_TIMES
            costs.append(min(max(median(measured), least), most) if is_known else unknown)
        return costs


class BackgroundBudget:
    """Chooses the background work of one engine's steps.

    Args:
        max_rows: maximum rows of a step.
        chunks: whether a prompt may be computed in parts.
    """

    def __init__(self, max_rows: int, *, chunks: bool) -> None:
        self._max_rows, self._chunks = max_rows, chunks
        self._alone_s: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
        self._decoding: dict[int, _AmountCosts] = defaultdict(_AmountCosts)  # by number of online requests
        self._prompts: dict[int, _AmountCosts] = defaultdict(_AmountCosts)
        self._saved_s = 0.0
        self._last: tuple[int, int] | None = None
        self._num_joined = 0  # consecutive steps with background work
        self._row_s = 0.0  # seconds per row of the last step with background work alone
        self._online_step_s = math.inf  # seconds of the last step with online requests alone

    def alone(self, num_decoding: int, rows_each: int, *, quiet: bool) -> BackgroundWork:
        """Return the work of a step without online requests, one of which may arrive meanwhile.

        Args:
            num_decoding: requests that could decode, with `rows_each` rows each.
            quiet: none arrived recently: all requests decode, and only prompts are limited to keep the step
                short.
        """
        short_s = _SHORT_STEPS * self._online_step_s
        if quiet:
            short_s = max(short_s, _SHORT_S)
        most = int(min(short_s / self._row_s, self._max_rows)) if self._row_s > 0 else self._max_rows
        if not quiet:
            num_decoding = min(num_decoding, max(most // rows_each, 1))
            most -= num_decoding * rows_each
        return BackgroundWork(num_decoding, max(most, _CHUNK) if self._chunks else self._max_rows)

    def beside(self, num_online: int, num_drafts: int, num_decoding: int) -> BackgroundWork:
        """Return the work of a step in which `num_online` requests decode with `num_drafts` drafts each.

        Args:
            num_decoding: background requests that could decode.
        """
        step = num_online, num_drafts
        is_settled, self._last = step == self._last, step  # a draft length on trial must be measured
        times_s = self._alone_s[step]
        if not is_settled or len(times_s) < _MIN_TIMES or self._num_joined >= _MEASURE_EVERY:
            return NOTHING
        saved, load = self._saved_s / median(times_s), _power(num_online)
        decoding, cost = self._decoding[load].affordable(num_decoding, saved)
        chunks = self._max_rows / _CHUNK if self._chunks else 0
        prompts, _ = self._prompts[load].affordable(chunks, saved - cost)
        return BackgroundWork(int(decoding), int(prompts * _CHUNK))

    def observe_online(self, num_online: int, num_drafts: int, seconds: float) -> None:
        """Record a step in which only online requests decoded."""
        if seconds <= 0:  # nothing was measured
            return
        self._alone_s[num_online, num_drafts].append(seconds)
        self._online_step_s, self._num_joined = seconds, 0
        self._save(seconds, 0.0)

    def observe_joined(
        self, num_online: int, num_drafts: int, portion: BackgroundWork, seconds: float
    ) -> None:
        """Record a step in which background work joined online requests."""
        if seconds <= 0:
            return
        self._num_joined += 1
        base_s, load = median(self._alone_s[num_online, num_drafts]), _power(num_online)
        cost = seconds / base_s - 1.0
        if portion.prompt_rows:
            joined = self._decoding[load].cost(portion.num_decoding) if portion.num_decoding else 0.0
            self._prompts[load].observe(portion.prompt_rows / _CHUNK, cost - joined)
        else:
            self._decoding[load].observe(portion.num_decoding, cost)
        self._save(base_s, seconds - base_s)

    def observe_alone(self, num_rows: int, seconds: float) -> None:
        """Record a step of background work alone."""
        if seconds > 0:
            self._row_s = seconds / num_rows

    def _save(self, base_s: float, spent_s: float) -> None:
        saved_s = self._saved_s + _SHARE * base_s - spent_s
        self._saved_s = min(max(saved_s, -_MAX_DEBT * base_s), _MAX_SAVED * base_s)


def _power(units: float) -> int:
    """Return the exponent of the smallest power of two that is at least `units`."""
    return max(math.ceil(math.log2(units)), 0) if units > 1 else 0
