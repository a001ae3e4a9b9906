"""A gateway's own metrics. `cluster/metrics/fleet_metrics.py` defines their names and meanings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ...cluster.fleet.router import RouteChoice
from ...cluster.metrics.fleet_metrics import GATEWAY_CATALOGUE
from .replica_set import Fleet


class GatewayFigures(Collector):
    """Counts the events of one gateway and exports them to Prometheus.

    Args:
        fleet: replicas for `manta:gateway_replica_up`.
        gateway: label of all metrics.
    """

    def __init__(self, fleet: Fleet, gateway: str) -> None:
        self._fleet = fleet
        self._gateway = gateway
        self._http: Counter[tuple[str, ...]] = Counter()
        self._routed: Counter[tuple[str, ...]] = Counter()
        self._resumed: Counter[tuple[str, ...]] = Counter()
        self._retried: Counter[tuple[str, ...]] = Counter()
        self._isolated: Counter[tuple[str, ...]] = Counter()
        self._poisonous: Counter[tuple[str, ...]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http[handler, method, str(status)] += 1

    def routed(self, model: str, choice: RouteChoice) -> None:
        self._routed[model, choice.reason] += 1

    def resumed(self, model: str) -> None:
        """Count a stream that another replica continues."""
        self._resumed[model,] += 1

    def retried(self, model: str) -> None:
        """Count a request that another replica starts again, after none of its output was sent."""
        self._retried[model,] += 1

    def isolated(self, model: str) -> None:
        """Count a suspect that is sent to a replica as the only suspect there."""
        self._isolated[model,] += 1

    def poisonous(self, model: str) -> None:
        """Count a request that ends because replicas died each time they served it."""
        self._poisonous[model,] += 1

    def render(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Family]:
        values: dict[str, Mapping[tuple[str, ...], float]] = {
            "manta:gateway_http_requests": self._http,
            "manta:gateway_requests": self._routed,
            "manta:gateway_resumed_streams": self._resumed,
            "manta:gateway_retried_requests": self._retried,
            "manta:gateway_isolated_requests": self._isolated,
            "manta:gateway_poisonous_requests": self._poisonous,
            "manta:gateway_replica_up": self._ups(),
        }
        for metric in GATEWAY_CATALOGUE:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in values[metric.name].items():
                family.add_metric([self._gateway, *labels], value)
            yield family

    def _ups(self) -> dict[tuple[str, ...], float]:
        ready = {member.name for model in self._fleet.models for member in self._fleet.ready(model)}
        return {
            (member.record.names[0], member.name): float(member.name in ready)
            for member in self._fleet.members
        }
