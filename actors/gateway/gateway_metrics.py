"""A gateway's own metrics. `cluster/metrics/fleet_metrics.py` defines their names and meanings."""

from __future__ import annotations

from collections import Counter

from ...cluster.fleet.router import RouteChoice
from ...cluster.metrics.fleet_metrics import GATEWAY_CATALOGUE
from ..observability.prometheus_text import Exposition, Values
from .replica_set import Fleet


class GatewayMetrics:
    def __init__(self, fleet: Fleet, gateway: str) -> None:
        self._fleet = fleet
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            metric.name: Counter() for metric in GATEWAY_CATALOGUE if metric.kind == "counter"
        }
        self._exposition = Exposition(GATEWAY_CATALOGUE, {"gateway": gateway}, self._values)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._counts["manta:gateway_http_requests"][handler, method, str(status)] += 1

    def routed(self, model: str, choice: RouteChoice) -> None:
        self._counts["manta:gateway_requests"][model, choice.reason] += 1

    def resumed(self, model: str) -> None:
        self._counts["manta:gateway_resumed_streams"][model,] += 1

    def retried(self, model: str) -> None:
        """Count a request that another replica starts again, before any output was sent."""
        self._counts["manta:gateway_retried_requests"][model,] += 1

    def isolated(self, model: str) -> None:
        self._counts["manta:gateway_isolated_requests"][model,] += 1

    def poisonous(self, model: str) -> None:
        """Count a request that ends because replicas died each time they served it."""
        self._counts["manta:gateway_poisonous_requests"][model,] += 1

    def render(self) -> str:
        return self._exposition.text().decode()

    def _values(self) -> dict[str, Values]:
        ready = {member.name for model in self._fleet.models for member in self._fleet.ready(model)}
        ups = {(each.record.names[0], each.name): float(each.name in ready) for each in self._fleet.members}
        return {**self._counts, "manta:gateway_replica_up": ups}
