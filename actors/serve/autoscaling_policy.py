"""Our policy of how many replicas there should be, as Ray Serve wants one. Nothing is decided here.

Named in a deployment's `autoscaling_config.policy`; Serve's controller makes one object of the class per
deployment, keeps it, and calls it ten times a second with what the replicas' `record_autoscaling_stats` sent
last. This module is pickled into the controller, and what it imports is imported there: nothing heavy, and of
Ray its metrics alone (`autoscaling_metrics.py`). The decision is `cluster/fleet/autoscaling.py`'s. Serve then
applies bounds, factors and delays of its own; `scaling_options` leaves the delays at nothing: two in a row
would only be slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol

from ...cluster.config import from_mapping
from ...cluster.fleet.autoscaling import FleetLoad, ReplicaCount, ScalingRules
from ...cluster.fleet.replica_stats import ReplicaStats
from .autoscaling_metrics import ScalingMetrics

POLICY = "manta.actors.serve.autoscaling_policy:SpeculativeScaling"
# Serve sends a replica's figures so often, by a key that it calls deprecated: its new names do nothing yet.
METRICS_INTERVAL_S = 1.0
LOOK_BACK_S = 5.0  # must be longer
_FIGURES = tuple(field.name for field in fields(ReplicaStats))


class TimedValue(Protocol):
    """One point of a replica's statistics."""

    value: float


class ServeContext(Protocol):
    """What of Serve's `AutoscalingContext` is looked at. `raw_metrics`: by name, then by replica."""

    @property
    def app_name(self) -> str: ...
    @property
    def deployment_name(self) -> str: ...
    @property
    def current_num_replicas(self) -> int: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def total_queued_requests(self) -> float | None: ...
    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[TimedValue]]] | None: ...  # Any: Serve's ids
    @property
    def capacity_adjusted_min_replicas(self) -> int: ...
    @property
    def capacity_adjusted_max_replicas(self) -> int: ...
    @property
    def current_time(self) -> float: ...


class SpeculativeScaling:
    """As many replicas as the load is worth.

    Args:
        rules: fields of `ScalingRules`, from `policy_kwargs`.

    Raises:
        ConfigError: a rule is unknown or makes no sense; the deployment is refused.
    """

    def __init__(self, **rules: float) -> None:
        self._count = ReplicaCount(from_mapping(ScalingRules, rules, "policy_kwargs."))
        self._metrics: ScalingMetrics | None = None  # made in the controller: they cannot be pickled

    def __call__(
        self, ctx: ServeContext
    ) -> tuple[int, dict[str, Any]]:  # Any: a policy's state; ours is here
        """The number of replicas, and Serve's memory for policies without one."""
        load = FleetLoad.of(latest(ctx), ctx.current_num_replicas, ctx.total_queued_requests or 0.0)
        wanted = self._count.wanted(
            load,
            ctx.target_num_replicas,
            ctx.capacity_adjusted_min_replicas,
            ctx.capacity_adjusted_max_replicas,
            ctx.current_time,
        )
        if self._metrics is None:
            self._metrics = ScalingMetrics(ctx.app_name, ctx.deployment_name)
        self._metrics.show(load, ctx.target_num_replicas, wanted)
        return wanted, {}


def latest(ctx: ServeContext) -> list[ReplicaStats]:
    """What each replica said last. Serve's means would lag behind by seconds, and cost it a merge each."""
    found: dict[Any, dict[str, float]] = {}
    for name in _FIGURES:
        for replica, points in (ctx.raw_metrics or {}).get(name, {}).items():
            if points:
                found.setdefault(replica, {})[name] = points[-1].value
    return [ReplicaStats(**figures) for figures in found.values() if len(figures) == len(_FIGURES)]


def initial_replicas(least: int) -> int:
    """The first replica comes also where none need stay."""
    return max(least, 1)


def scaling_options(least: int, most: int, rules: ScalingRules) -> dict[str, Any]:  # Any: Serve's options
    """How many replicas: a fixed number, or between two as the load asks."""
    if least == most:
        return {"num_replicas": most}
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "initial_replicas": initial_replicas(least),
            "max_replicas": most,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": POLICY, "policy_kwargs": asdict(rules)},
        }
    }
