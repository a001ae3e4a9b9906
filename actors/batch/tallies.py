"""Bounded sums for `figures.py`: of rows of any number, in any order, merged in any order, to one result.

Each keeps only so many places, and what does not fit is summed more coarsely. What is kept depends on what
was counted and not on the order, so figures of parts add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ...cluster.acceptance import mean_acceptance_length

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_BUCKETS = 128
MAX_STRETCHES = 32
MAX_NAMES = 24
MAX_NAME = 80  # characters
PAUSE_S = 15.0


def add_lists(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Sums by place."""
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def lengths(numbers: Ints) -> list[int]:
    """A histogram by powers of two: place 0 counts zeros, place k those from 2^(k-1) to 2^k - 1."""
    if not len(numbers):
        return []
    return np.bincount(np.frexp(numbers.astype(np.float64))[1]).tolist()


def length_range(place: int) -> tuple[int, int]:
    """The lengths that a place of such a histogram counts: the first, the last."""
    return (1 << place - 1, (1 << place) - 1) if place else (0, 0)


@dataclass(slots=True)
class Timeline:
    """Tokens over time.

    Attributes:
        width_s: of a bucket; the least power of two with which at most MAX_BUCKETS have tokens.
        tokens: by bucket; number n begins at Unix time n x width_s.
    """

    width_s: int = 1
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, ends_s: Floats, tokens: Ints) -> Self:
        """Tokens came at those times."""
        buckets, places = np.unique(np.floor(ends_s).astype(np.int64), return_inverse=True)
        sums = np.zeros(len(buckets), np.int64)
        np.add.at(sums, places, tokens)
        made = cls(1, dict(zip(buckets.tolist(), sums.tolist(), strict=True)))
        made._coarsen()
        return made

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> Self:
        return cls(counts["width_s"], {int(bucket): tokens for bucket, tokens in counts["tokens"].items()})

    def merge(self, other: Timeline) -> None:
        width_s = max(self.width_s, other.width_s)
        self._widen(width_s)
        for bucket, tokens in other.tokens.items():
            wide = bucket * other.width_s // width_s
            self.tokens[wide] = self.tokens.get(wide, 0) + tokens
        self._coarsen()

    def _coarsen(self) -> None:
        while len(self.tokens) > MAX_BUCKETS:
            self._widen(2 * self.width_s)

    def _widen(self, width_s: int) -> None:
        if width_s == self.width_s:
            return
        narrow, self.tokens = self.tokens, {}
        for bucket, tokens in narrow.items():
            wide = bucket * self.width_s // width_s
            self.tokens[wide] = self.tokens.get(wide, 0) + tokens
        self.width_s = width_s


@dataclass(slots=True)
class Stretches:
    """When rows were worked on (Unix time), without the pauses between runs.

    Attributes:
        times: begin and end of every stretch, in order. What is no longer than PAUSE_S is no pause between
            two; nor are the shortest ones where there would be more than MAX_STRETCHES, and only then does
            the order matter in which figures are merged.
    """

    times: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, begins_s: Floats, ends_s: Floats) -> Self:
        """Of rows that were worked on from then to then."""
        if not len(begins_s):
            return cls()
        order = np.argsort(begins_s)
        begins, ends = begins_s[order], np.maximum.accumulate(ends_s[order])
        last = np.append(begins[1:] > ends[:-1] + PAUSE_S, True)
        first = np.append(True, last[:-1])
        made = cls(np.stack([begins[first], ends[last]], axis=1).tolist())
        made._bound()
        return made

    def merge(self, other: Stretches) -> None:
        self.times = _joined(sorted([*self.times, *other.times]), PAUSE_S)
        self._bound()

    @property
    def seconds(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.times)

    def _bound(self) -> None:
        if len(self.times) > MAX_STRETCHES:
            pauses = sorted(after[0] - before[1] for before, after in pairwise(self.times))
            self.times = _joined(self.times, pauses[-MAX_STRETCHES])


def _joined(times: Iterable[Sequence[float]], pause_s: float) -> list[list[float]]:
    joined: list[list[float]] = []
    for begin_s, end_s in times:
        if joined and begin_s <= joined[-1][1] + pause_s:
            joined[-1][1] = max(joined[-1][1], end_s)
        else:
            joined.append([begin_s, end_s])
    return joined


@dataclass(slots=True)
class Category:
    """Sums over rows of one category."""

    rows: int = 0
    failed: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)

    def merge(self, other: Category) -> None:
        for name in ("rows", "failed", "completion_tokens", "num_steps", "num_accepted_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Categories:
    """Sums by category: of the first MAX_NAMES in the alphabet, and of all others together in `rest`."""

    named: dict[str, Category] = field(default_factory=dict)
    rest: Category = field(default_factory=Category)

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> Self:
        named = {name: Category(**sums) for name, sums in counts["named"].items()}
        return cls(named, Category(**counts["rest"]))

    def counts(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)

    def add(self, name: str, sums: Category) -> None:
        """Count rows of a category; long names are cut."""
        self._put(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…", sums)
        self._fold()

    def merge(self, other: Categories) -> None:
        for name, sums in other.named.items():
            self._put(name, sums)
        self.rest.merge(other.rest)
        self._fold()

    def ranked(self) -> list[tuple[str, Category]]:
        """Those with names, the largest first; then all others together."""
        named = sorted(self.named.items(), key=lambda item: (-item[1].rows, item[0]))
        return [*named, ("(all others)", self.rest)] if self.rest.rows else named

    def _put(self, name: str, sums: Category) -> None:
        self.named.setdefault(name, Category()).merge(sums)

    def _fold(self) -> None:
        for name in sorted(self.named)[MAX_NAMES:]:
            self.rest.merge(self.named.pop(name))
