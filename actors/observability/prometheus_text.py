"""Formats metric values as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...cluster.metrics.metric import HistogramCounts, Metric

# A mapping from label values (in the catalogue's order), empty if there is no value now; or a single value.
Values = float | Mapping[tuple[str, ...], float] | HistogramCounts


class Exposition(Collector):
    """Exports metrics as Prometheus text. `values` returns them at each scrape; missing ones are left out."""

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
        """Called by prometheus_client's registry."""
        values = self._values()
        for metric in self._catalogue:
            if metric.name in values:
                yield family_of(metric, self._labels, values[metric.name])


def family_of(metric: Metric, labels: Mapping[str, str], value: Values) -> Family:
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
    """Return each bound, as Prometheus writes it, with the number of values up to it."""
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    return list(zip(bounds, map(float, counts.cumulative), strict=True))
