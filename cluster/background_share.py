"""How much background work a step takes along: all of it where nobody else wants the engine, else little.

Beside online requests background work may take a small share of the engine's time, `_SHARE`, whatever the
machine. It is saved up while online requests decode alone and spent where background work joins them, by what
the step then took longer; too much spent is a debt that is saved up again. So the share holds whether or not
a cost was foreseen well. What joins is the work that is cheap: on a GPU, where a decoding step is bound by
bytes, most decoding requests cost next to nothing and join every step, while a chunk of a prompt costs a pass
of its own and joins now and then; where each row costs, as on a CPU, one request joins once in several steps.

Costs are measured, as parts of the time that the same step took just before without any; by kind of work, by
amount in powers of two, and by number of online requests. An amount that is not known is taken to cost what
the next smaller one does, the first one a whole step. Nothing joins while the step's own time is not known,
nor where online requests do not all decode alike. Knows no sequences; used by `pace.py` alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

_SHARE = 0.03  # of the time in which online requests decode
_LIGHT = 0.05  # of a step: what costs less may grow
_LEAST = 0.01  # of a step: what costs less is not told from nothing
_MOST_SAVED, _MOST_OWED = 1.5, 4.0  # steps
_TIMES, _FEWEST = 5, 3  # the last ones count, by their median; fewer are no measure
_NEW = 1 / 16  # weight of the last step in what they take about
_ALONE_EVERY = 16  # steps: then online requests decode alone, to be measured
_TRY_EVERY = 64  # times that work joins: then more of it does
_SMALLEST_CHUNK = 16  # rows of a prompt
_SHORT_STEPS = 4.0  # of online requests: so long may a step without them take where they come and go
_SHORT_S = 0.05  # the same for its prompts where nobody has come for a while, if that is more


@dataclass(frozen=True, slots=True)
class Portion:
    """Background work of one step.

    Attributes:
        num_decoding: most requests that decode.
        prompt_rows: most rows of prompts.
    """

    num_decoding: int
    prompt_rows: int


NOTHING = Portion(0, 0)


@dataclass(slots=True)
class _Ladder:
    """What amounts of one kind of work cost, as parts of a step; rung i stands for up to 2**i units."""

    costs: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque[float](maxlen=_TIMES))
    )
    num_joined: int = 0

    def learn(self, units: float, cost: float) -> None:
        self.costs[_rung(units)].append(cost)
        self.num_joined += 1

    def cost(self, units: float) -> float:
        return self._costs(_rung(units))[-1]

    def most(self, units: float, saved: float) -> tuple[float, float]:
        """How many of so many units join, and their cost."""
        if units <= 0:
            return 0.0, 0.0
        costs = self._costs(_rung(units))
        bound = min(max(_LIGHT, 1.25 * costs[0]), saved)
        num_fitting = bisect_right(costs, bound)
        if num_fitting == 0:
            return 0.0, 0.0
        if self.num_joined % _TRY_EVERY == _TRY_EVERY - 1:
            num_fitting = min(num_fitting + 1, len(costs))
        return min(units, 2.0 ** (num_fitting - 1)), costs[num_fitting - 1]

    def _costs(self, rung: int) -> list[float]:
        """Of all rungs up to this one; they rise, for twice as much work costs once to twice as much."""
        costs: list[float] = []
        for known in (self.costs[i] for i in range(rung + 1)):
            least, most = (costs[-1], 2 * costs[-1]) if costs else (_LEAST, _MOST_SAVED)
            unknown = least if costs else 1.0
            costs.append(min(max(median(known), least), most) if len(known) >= _FEWEST else unknown)
        return costs


class BackgroundShare:
    """The choice for one engine.

    Args:
        max_rows: of a step.
        chunks: whether a prompt may be computed in parts.
    """

    def __init__(self, max_rows: int, *, chunks: bool) -> None:
        self._max_rows, self._chunks = max_rows, chunks
        self._alone_s: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_TIMES))
        self._decoding: dict[int, _Ladder] = defaultdict(_Ladder)  # by load
        self._prompts: dict[int, _Ladder] = defaultdict(_Ladder)
        self._saved_s = 0.0
        self._last: tuple[int, int] | None = None
        self._num_joined = 0  # steps since the last one that was not
        self._row_s = 0.0  # of the last step of background work alone
        self._online_step_s = math.inf  # about; where nobody has ever come, no step is too long

    def alone(self, num_decoding: int, rows_each: int, *, quiet: bool) -> Portion:
        """Of a step without online requests: who comes meanwhile waits for its end.

        Args:
            num_decoding: how many could decode, with so many rows each.
            quiet: nobody has come for a while: then all decode, and only prompts keep the step short.
        """
        short_s = _SHORT_STEPS * self._online_step_s
        if quiet:
            short_s = max(short_s, _SHORT_S)
        most = int(min(short_s / self._row_s, self._max_rows)) if self._row_s > 0 else self._max_rows
        if not quiet:
            num_decoding = min(num_decoding, max(most // rows_each, 1))
            most -= num_decoding * rows_each
        return Portion(num_decoding, max(most, _SMALLEST_CHUNK) if self._chunks else self._max_rows)

    def beside(self, num_online: int, num_drafts: int, num_decoding: int) -> Portion:
        """Of a step in which so many online requests decode with so many drafts each, and so many of the
        background could."""
        step = num_online, num_drafts
        settled, self._last = step == self._last, step  # a length of drafts that is tried must be measured
        times_s = self._alone_s[step]
        if not settled or len(times_s) < _FEWEST or self._num_joined >= _ALONE_EVERY:
            return NOTHING
        saved, load = self._saved_s / median(times_s), _rung(num_online)
        decoding, cost = self._decoding[load].most(num_decoding, saved)
        chunks = self._max_rows / _SMALLEST_CHUNK if self._chunks else 0
        prompts, _ = self._prompts[load].most(chunks, saved - cost)
        return Portion(int(decoding), int(prompts * _SMALLEST_CHUNK))

    def learn_online(self, num_online: int, num_drafts: int, seconds: float) -> None:
        """How long a step took in which only they decoded."""
        if seconds <= 0:  # nothing is measured
            return
        self._alone_s[num_online, num_drafts].append(seconds)
        before_s = self._online_step_s if math.isfinite(self._online_step_s) else seconds
        self._online_step_s = before_s + _NEW * (seconds - before_s)
        self._num_joined = 0
        self._save(seconds, 0.0)

    def learn_joined(self, num_online: int, num_drafts: int, portion: Portion, seconds: float) -> None:
        """How long it took with this beside them."""
        if seconds <= 0:
            return
        self._num_joined += 1
        base_s, load = median(self._alone_s[num_online, num_drafts]), _rung(num_online)
        cost = seconds / base_s - 1.0
        if portion.prompt_rows:
            joined = self._decoding[load].cost(portion.num_decoding) if portion.num_decoding else 0.0
            self._prompts[load].learn(portion.prompt_rows / _SMALLEST_CHUNK, cost - joined)
        else:
            self._decoding[load].learn(portion.num_decoding, cost)
        self._save(base_s, seconds - base_s)

    def learn_alone(self, num_rows: int, seconds: float) -> None:
        """How long a step of background work took."""
        if seconds > 0:
            self._row_s = seconds / num_rows

    def _save(self, base_s: float, spent_s: float) -> None:
        saved_s = self._saved_s + _SHARE * base_s - spent_s
        self._saved_s = min(max(saved_s, -_MOST_OWED * base_s), _MOST_SAVED * base_s)


def _rung(units: float) -> int:
    return max(math.ceil(math.log2(units)), 0) if units > 1 else 0
