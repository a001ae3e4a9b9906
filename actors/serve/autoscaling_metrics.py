"""Exports the autoscaler's inputs and decisions as Ray metrics, because its policy runs in Serve's
controller.

Names and meanings are in `cluster/metrics/fleet_metrics.py`. Used only by `autoscaling_policy.py`.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from ...cluster.fleet.autoscaling import FleetLoad
from ...cluster.metrics.fleet_metrics import SCALING_CATALOGUE


class ScalingMetrics:
    """Autoscaling metrics of one deployment.

    Args:
        application, deployment: values of the metrics' tags.
    """

    def __init__(self, application: str, deployment: str) -> None:
        tags = {"application": application, "deployment": deployment}
        self._gauges: dict[str, Gauge] = {}
        for metric in SCALING_CATALOGUE:
            if metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(metric.name, metric.help, metric.labels)
                self._gauges[metric.name].set_default_tags(tags)
            else:
                self._decisions = Counter(f"{metric.name}_total", metric.help, metric.labels)
                self._decisions.set_default_tags(tags)

    def show(self, load: FleetLoad, target: int, wanted: int) -> None:
        """Export one evaluation: `target` replicas were wanted before it, `wanted` are wanted now."""
        values = {
            "manta_autoscaler_replicas": load.there,
            "manta_autoscaler_wanted_replicas": wanted,
            "manta_autoscaler_busy_replicas": load.busy,
            "manta_autoscaler_backlog_seconds": load.backlog_s,
            "manta_autoscaler_queued_requests": load.queued,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        if wanted != target:
            self._decisions.inc(1, {"direction": "up" if wanted > target else "down"})
