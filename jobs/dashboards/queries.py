"""PromQL over the metrics of the catalogue, in the names of one exporter.

Two exporters show the same figures by other names: a replica's own `/metrics` (vLLM's names), and Ray's agent
on every node, which has no gateways, but the autoscaler and batch jobs. Queries are written in the names of
`/metrics` (`boards.yaml`, `alerts.yaml`); `Dialect.translate` checks every name and rewrites it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...cluster.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from ...cluster.metric import Metric
from ...cluster.metrics import CATALOGUE

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_NAME = re.compile(r"(?<![\w:$])([a-z_]\w*(?::\w+)?)(?:\{([^}]*)\})?")
_OURS = re.compile(r"\w+:|manta_|http_")  # how every exported name begins


class UnknownMetricError(KeyError):
    """An exporter has no such metric."""


def _exported(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Return the metrics by the names of their samples: counters end in `_total`, histograms have three."""
    return {metric.name + suffix: metric for metric in metrics for suffix in _SUFFIXES[metric.kind]}


_ALL = _exported((*CATALOGUE, *GATEWAY_CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))


@dataclass(frozen=True)
class Dialect:
    """How an exporter names metrics.

    Attributes:
        name: stands in the titles and ids of its dashboards.
        samples: the metrics that it has, by the catalogue's names of their samples.
        replica: its label of a replica.
        prefix: before every name.
        colon: replaces the colon of a name.
        used: the metrics that were translated so far.
    """

    name: str
    samples: Mapping[str, Metric]
    replica: str
    prefix: str = ""
    colon: str = ":"
    used: set[str] = field(default_factory=set, compare=False)

    def translate(self, query: str, *, filtered: bool = True) -> str:
        """Return a query in this exporter's names.

        Args:
            filtered: narrow each metric to the dashboard's variables `$model` and `$replica`.

        Raises:
            UnknownMetricError: the exporter lacks one of the query's metrics.
        """

        def rewrite(found: re.Match[str]) -> str:
            name, matchers = found[1], found[2]
            if name == "replica":
                return self.replica
            if name not in _ALL:
                assert not _OURS.match(name), f"{name} is no sample of the catalogue"
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
        """Return the exporter's name of a sample."""
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
    """Return the names of Ray's exporter."""
    samples = _exported((*CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE))
    return Dialect("ray", samples, "ReplicaId", prefix="ray_", colon="_")
