"""When a batch job ran: a mergeable part of `RowStats` (`row_stats.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

MAX_INTERVALS = 32
PAUSE_S = 15.0  # a longer gap between rows is a pause between runs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RunIntervals:
    """The intervals in which a job ran, [begin, end] in Unix seconds; the shortest pauses are left out."""

    times: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, begins_s: Floats, ends_s: Floats) -> Self:
        made = cls()
        made._join(map(list, zip(begins_s.tolist(), ends_s.tolist(), strict=True)))
        return made

    def merge(self, other: RunIntervals) -> None:
        self._join([*self.times, *other.times])

    @property
    def seconds(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.times)

    def _join(self, times: Iterable[list[float]]) -> None:
        self.times = _joined(sorted(times), PAUSE_S)
        if len(self.times) > MAX_INTERVALS:
            gaps = sorted(after[0] - before[1] for before, after in pairwise(self.times))
            self.times = _joined(self.times, gaps[-MAX_INTERVALS])


def _joined(times: Iterable[Sequence[float]], longest_gap_s: float) -> list[list[float]]:
    joined: list[list[float]] = []
    for begin_s, end_s in times:
        if joined and begin_s <= joined[-1][1] + longest_gap_s:
            joined[-1][1] = max(joined[-1][1], end_s)
        else:
            joined.append([begin_s, end_s])
    return joined
