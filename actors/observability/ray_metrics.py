"""Mirrors an engine's metrics into Ray's own, where they appear next to Ray's and Serve's.

Ray drops names with a colon: `vllm:...` becomes `ray_vllm_...`, with a delay of about ten seconds. A
histogram is exported as Prometheus's three kinds of series (`_bucket` by `le`, `_sum`, `_count`), as gauges:
Ray's own histogram would need a call for each observation, that is, for each token.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import ray
from ray.util.metrics import Counter, Gauge

from ...cluster.metrics.engine_metrics import CATALOGUE
from ...cluster.metrics.metric import SHARED_LABELS, HistogramCounts, Metric
from .prometheus_text import Values, buckets_of

Tags = dict[str, str]


class RayMetrics:
    """`update` is a `MetricsMirror` into Ray."""

    def __init__(self, model_name: str, replica: str) -> None:
        tags = {"model_name": model_name, "ReplicaId": replica}
        self._metrics = {metric.name: _made(metric, tags) for metric in CATALOGUE}
        self._is_exported = False

    def update(self, values: Mapping[str, Values]) -> None:
        # Ray loses what counters were increased by before the node's agent has started.
        self._is_exported = self._is_exported or _exporter_answers()
        if not self._is_exported:
            return
        for name, value in values.items():
            self._metrics[name].show(value)


def _exporter_answers() -> bool:
    """Return whether this node's agent serves the metrics of its processes."""
    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            try:
                with socket.create_connection((node["NodeManagerAddress"], node["MetricsExportPort"]), 1.0):
                    return True
            except OSError:
                return False
    return False


class _Simple:
    def __init__(self, metric: Metric, tags: Tags) -> None:
        self._own = tuple(label for label in metric.labels if label not in SHARED_LABELS)
        name, keys = metric.name.replace(":", "_"), (*self._own, *tags)
        self._gauge = Gauge(name, metric.help, keys) if metric.kind == "gauge" else None
        self._counter = Counter(f"{name}_total", metric.help, keys) if metric.kind == "counter" else None
        for made in (self._gauge, self._counter):
            if made is not None:
                made.set_default_tags(tags)
        self._shown: dict[tuple[str, ...], float] = {}

    def show(self, value: Values) -> None:
        assert not isinstance(value, HistogramCounts), "a histogram is no counter"
        samples = value if isinstance(value, Mapping) else {(): value}
        for own_values, each in samples.items():
            tags = dict(zip(self._own, own_values, strict=True))
            if self._gauge is not None:
                self._gauge.set(each, tags)
            elif self._counter is not None and (grown := each - self._shown.get(own_values, 0.0)) > 0.0:
                self._counter.inc(grown, tags)
                self._shown[own_values] = each


class _Histogram:
    def __init__(self, metric: Metric, tags: Tags) -> None:
        name = metric.name.replace(":", "_")
        self._metric = metric
        self._buckets = Gauge(f"{name}_bucket", metric.help, ("le", *tags))
        self._sum = Gauge(f"{name}_sum", metric.help, tuple(tags))
        self._count = Gauge(f"{name}_count", metric.help, tuple(tags))
        for made in (self._buckets, self._sum, self._count):
            made.set_default_tags(tags)

    def show(self, value: Values) -> None:
        assert isinstance(value, HistogramCounts), "a histogram is no number"
        for bound, count in buckets_of(self._metric, value):
            self._buckets.set(count, {"le": bound})
        self._sum.set(value.sum)
        self._count.set(value.cumulative[-1])


def _made(metric: Metric, tags: Tags) -> _Simple | _Histogram:
    return _Histogram(metric, tags) if metric.kind == "histogram" else _Simple(metric, tags)
