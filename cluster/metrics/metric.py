"""The definition of a metric, and bounds of histograms; the catalogue is in `engine_metrics.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = SHARED_LABELS
    buckets: tuple[float, ...] = ()
