"""Metrics as Prometheus's text, from values by the catalogue's names. Nothing is counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...cluster.metrics.histogram import HistogramCounts
from ...cluster.metrics.metric import Metric

# A mapping where a metric has labels of its own (their values, in the catalogue's order), or no value now.
Values = float | Mapping[tuple[str, ...], float] | HistogramCounts


class Exposition(Collector):
    """The text of some metrics.

    Args:
        catalogue: of the metrics.
        labels: those that all share, with their values.
        values: asked for at each scrape, by name. What has none is not shown.
    """

    def __init__(
        self,
        catalogue: Iterable[Metric],
        labels: Mapping[str, str],
        values: Callable[[], Mapping[str, Values]],
    ) -> None:
        self._catalogue, self._labels, self._values = tuple(catalogue), labels, values
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """What prometheus_client's registry asks for."""
        values = self._values()
        for metric in self._catalogue:
            if metric.name in values:
                yield family_of(metric, self._labels, values[metric.name])


def family_of(metric: Metric, labels: Mapping[str, str], value: Values) -> Family:
    """One metric with its samples."""
    shared = {name: given for name, given in labels.items() if name in metric.labels}
    if isinstance(value, HistogramCounts):
        family = HistogramMetricFamily(metric.name, metric.help, labels=list(shared))
        family.add_metric(list(shared.values()), buckets_of(metric, value), value.sum)
        return family
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    own = [name for name in metric.labels if name not in shared]
    family = kind(metric.name, metric.help, labels=[*shared, *own])
    samples = value.items() if isinstance(value, Mapping) else [((), value)]
    for own_values, each in samples:
        family.add_metric([*shared.values(), *own_values], each)
    return family


def buckets_of(metric: Metric, counts: HistogramCounts) -> list[tuple[str, float]]:
    """Each bound, as Prometheus writes it, and how many values were at most that."""
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    return list(zip(bounds, map(float, counts.cumulative), strict=True))
