"""Translates PromQL over the catalogue's metrics into the names of an exporter.

Two exporters have the same metrics under different names: a replica's own `/metrics` (vLLM's names), and
Ray's agent on every node, which lacks gateways but has the autoscaler and batch jobs. Queries are written in
the names of `/metrics` (`boards.yaml`, `alerts.yaml`); `Dialect.translate` checks and rewrites every name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...cluster.metrics.engine_metrics import CATALOGUE
from ...cluster.metrics.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from ...cluster.metrics.metric import Metric

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_NAME = re.compile(r"(?<![\w:$])([a-z_]\w*(?::\w+)?)(?:\{([^}]*)\})?")
_OURS = re.compile(r"\w+:|manta_|http_")  # prefixes of exported names


class UnknownMetricError(KeyError):
    """The exporter does not have the metric."""


def _exported(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Return the metrics by sample name: counters end in `_total`, histograms have three samples."""
    return {metric.name + suffix: metric for metric in metrics for suffix in _SUFFIXES[metric.kind]}


_ALL = _exported((*CATALOGUE, *GATEWAY_CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))


@dataclass(frozen=True)
class Dialect:
    """The metric names of an exporter, and its label for the replica.

    `samples` are its metrics by sample name in the catalogue, `used` those that were translated so far.
    """

    name: str
    samples: Mapping[str, Metric]
    replica: str
    prefix: str = ""
    colon: str = ":"
    used: set[str] = field(default_factory=set, compare=False)

    def translate(self, query: str, *, filtered: bool = True) -> str:
        """Return a query in this exporter's names; `filtered` narrows metrics to `$model` and `$replica`."""

        def rewrite(found: re.Match[str]) -> str:
            name, matchers = found[1], found[2]
            if name == "replica":
                return self.replica
            if name not in _ALL:
                assert not _OURS.match(name), f"{name} is not in the catalogue"
                return found[0]
            metric = self.samples.get(name)
            if metric is None:
                raise UnknownMetricError(name)
            self.used.add(metric.name)
            filters = [matchers] if matchers else []
            filters += self._variables(metric) if filtered else []
            return self.exported(name) + (f"{{{','.join(filters)}}}" if filters else "")

        return _NAME.sub(rewrite, query)

    def exported(self, sample: str) -> str:
        return self.prefix + sample.replace(":", self.colon)

    def _variables(self, metric: Metric) -> Iterator[str]:
        if "model_name" in metric.labels:
            yield 'model_name=~"$model"'
        if "replica" in metric.labels:
            yield f'{self.replica}=~"$replica"'


def vllm_names() -> Dialect:
    """Return the names on `/metrics` of replicas and gateways."""
    return Dialect("vllm", _exported((*CATALOGUE, *GATEWAY_CATALOGUE)), "replica")


def ray_names() -> Dialect:
    samples = _exported((*CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))
    return Dialect("ray", samples, "ReplicaId", prefix="ray_", colon="_")
