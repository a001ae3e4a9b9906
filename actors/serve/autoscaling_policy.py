"""Adapts the autoscaling decision of `cluster/fleet/autoscaling.py` to Ray Serve's policy interface.

Named in a deployment's `autoscaling_config.policy`. Serve's controller creates one instance per deployment
and calls it ten times a second with the last values of the replicas' `record_autoscaling_stats`. This module
is pickled into the controller and its imports run there, so it imports nothing heavy. Serve then applies its
own bounds, factors and delays; `scaling_options` sets the delays to zero because two delays in a row would
only be slow.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ray.util.metrics import Counter, Gauge

from ...cluster.config import from_mapping
from ...cluster.fleet.autoscaling import FleetLoad, ReplicaCount, ReplicaStats, ScalingRules
from ...cluster.metrics.fleet_metrics import SCALING_CATALOGUE

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

POLICY = "manta.actors.serve.autoscaling_policy:SpeculativeScaling"
# Interval at which Serve sends replica statistics; the key is deprecated, but its replacements have no effect
# yet.
METRICS_INTERVAL_S = 1.0
LOOK_BACK_S = 5.0  # must be longer than the interval
_FIGURES = tuple(field.name for field in fields(ReplicaStats))


class SpeculativeScaling:
    """Chooses the number of replicas by load. `rules`: fields of `ScalingRules`. Raises ConfigError."""

    def __init__(self, **rules: float) -> None:
        self._count = ReplicaCount(from_mapping(ScalingRules, rules, "policy_kwargs."))
        self._metrics: ScalingMetrics | None = None  # created in the controller, as metrics cannot be pickled

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:  # Any: Serve's policy state
        """Return the number of replicas, and an empty state for Serve."""
        assert ctx.current_time is not None, "Serve sets it before each call"
        load = FleetLoad.of(latest(ctx), ctx.current_num_replicas, ctx.total_queued_requests or 0.0)
        wanted = self._count.target(
            load,
            ctx.target_num_replicas,
            ctx.capacity_adjusted_min_replicas,
            ctx.capacity_adjusted_max_replicas,
            ctx.current_time,
        )
        if self._metrics is None:
            self._metrics = ScalingMetrics(ctx.app_name or "", ctx.deployment_name)
        self._metrics.show(load, ctx.target_num_replicas, wanted)
        return wanted, {}


def latest(ctx: AutoscalingContext) -> list[ReplicaStats]:
    """Return each replica's latest statistics. Serve's means would lag by seconds."""
    found: dict[Any, dict[str, float]] = {}
    for name in _FIGURES:
        for replica, points in (ctx.raw_metrics or {}).get(name, {}).items():
            if points:
                found.setdefault(replica, {})[name] = points[-1].value
    return [ReplicaStats(**figures) for figures in found.values() if len(figures) == len(_FIGURES)]


def initial_replicas(minimum: int) -> int:
    return max(minimum, 1)


def scaling_options(
    minimum: int, maximum: int, rules: ScalingRules
) -> dict[str, Any]:  # Any: Serve's options
    if minimum == maximum:
        return {"num_replicas": maximum}
    return {
        "autoscaling_config": {
            "min_replicas": minimum,
            "initial_replicas": initial_replicas(minimum),
            "max_replicas": maximum,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": POLICY, "policy_kwargs": asdict(rules)},
        }
    }


class ScalingMetrics:
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
        """Export one evaluation: `target` replicas were wanted before, `wanted` are now."""
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
