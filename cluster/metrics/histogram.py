"""Histograms of observations. Cheaper than prometheus_client's, and can add several equal values at once.

Counted on the engine's thread or the event loop, and read where metrics are exported.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple


class HistogramCounts(NamedTuple):
    """Snapshot: `cumulative` counts values up to each bound, then all values."""

    cumulative: tuple[int, ...]
    sum: float


NO_COUNTS = HistogramCounts((), 0.0)


class Histogram:
    """Counts per bucket; `bounds` ascend, without infinity."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def counts(self) -> HistogramCounts:
        return HistogramCounts(tuple(accumulate(self._counts)), self._sum)
