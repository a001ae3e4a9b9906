"""The parts of metrics: definitions, histograms, and bounded label values.

The catalogue is in `engine_metrics.py`.

Histograms are cheaper than prometheus_client's, and can add several equal values at once. They count on the
engine's thread or the event loop, and are read where metrics are exported.

Label values that clients choose are bounded, with one value for all others. A time series exists as long as
its process and costs memory wherever it is stored, and a value keeps its place, as reassigning it would make
a counter fall. So only configured names get a place (`allowed`); if any name may, the first ones do. Used by
`actors/observability/telemetry.py`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "requests",
    "tokens",
    "seconds",
    "ratio",
    "drafts",
    "preemptions",
    "rows",
    "engines",
    "experts",
    "layers",
    "steps",
    "drafters",
    "rests",
    "replicas",
    "completions",
    "times",
    "decisions",
    "info",
]

SHARED_LABELS = ("model_name", "engine", "replica")

# vLLM's bounds; its inter-token bounds start at 10 ms, too coarse for blocks of accepted drafts.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Also vLLM's.
STEP_TOKENS = (1.0, *(float(8 << n) for n in range(12)))
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
# Tokens of requests: vLLM's 1, 2, 5, 10, .. up to the engine's context; here up to a million.
REQUEST_TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
PAGE_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric.

    Attributes:
        name: without the `_total` of counters.
        help: its meaning, as shown by Prometheus.
        buckets: upper bounds of a histogram, without infinity.
        stat: attribute of `EngineStats` that is its value; empty: computed where it is exported.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = SHARED_LABELS
    buckets: tuple[float, ...] = ()
    stat: str = ""


def _number(
    kind: Kind,
    name: str,
    unit: Unit,
    help: str,
    *labels: str,
    shared: tuple[str, ...] = SHARED_LABELS,
    stat: str = "",
) -> Metric:
    return Metric(name, kind, unit, help, (*shared, *labels), stat=stat)


counter, gauge = partial(_number, "counter"), partial(_number, "gauge")


def histogram(
    name: str,
    unit: Unit,
    help: str,
    buckets: tuple[float, ...],
    *labels: str,
    shared: tuple[str, ...] = SHARED_LABELS,
    stat: str = "",
) -> Metric:
    return Metric(name, "histogram", unit, help, (*shared, *labels), buckets, stat)


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


NONE, OTHER = "none", "other"
ANY = "*"  # in a list of configured names: any name
_FITS = re.compile(r"[\w.:@/+-]{1,64}")


def is_label(name: str) -> bool:
    """Return whether a name is valid as a label's value and is not reserved."""
    return _FITS.fullmatch(name) is not None and name not in (NONE, OTHER)


class BoundedLabels:
    """The values of one label: at most `maximum` besides NONE and OTHER, of `allowed` names (ANY for all)."""

    def __init__(self, maximum: int, allowed: Sequence[str] = (ANY,)) -> None:
        self._most = maximum
        self._allowed = None if ANY in allowed else frozenset(allowed)
        self._known: set[str] = set()

    def of(self, name: str | None) -> str:
        """Return the name if it is valid and has or gets a place, else OTHER."""
        if name is None:
            return NONE
        if name in self._known:
            return name
        if len(self._known) == self._most or not is_label(name):
            return OTHER
        if self._allowed is not None and name not in self._allowed:
            return OTHER
        self._known.add(name)
        return name
