"""When a batch job ran, and its tokens by time: mergeable parts of `RowStats` (`row_stats.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

MAX_BUCKETS = 128  # of a timeline
MAX_INTERVALS = 32
PAUSE_S = 15.0  # a longer gap between rows is a pause between runs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Timeline:
    """Generated tokens by time, in buckets that widen so that their number is bounded."""

    width_s: int = 1  # width of a bucket; the smallest power of two that needs at most MAX_BUCKETS buckets
    # tokens by bucket; bucket n begins at Unix time n x width_s
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, ends_s: Floats, tokens: Ints) -> Self:
        made = cls()
        for second, num_tokens in zip(
            np.floor(ends_s).astype(np.int64).tolist(), tokens.tolist(), strict=True
        ):
            made.tokens[second] = made.tokens.get(second, 0) + num_tokens
        made._bound()
        return made

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["width_s"], {int(bucket): n for bucket, n in content["tokens"].items()})

    def merge(self, other: Timeline) -> None:
        self._widen(max(self.width_s, other.width_s))
        for bucket, num_tokens in other.tokens.items():
            wide = bucket * other.width_s // self.width_s
            self.tokens[wide] = self.tokens.get(wide, 0) + num_tokens
        self._bound()

    def _bound(self) -> None:
        while len(self.tokens) > MAX_BUCKETS:
            self._widen(2 * self.width_s)

    def _widen(self, width_s: int) -> None:
        narrow, self.tokens = self.tokens, {}
        for bucket, num_tokens in narrow.items():
            wide = bucket * self.width_s // width_s
            self.tokens[wide] = self.tokens.get(wide, 0) + num_tokens
        self.width_s = width_s


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
