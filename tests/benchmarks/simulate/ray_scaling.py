"""A copy of Ray Serve's default autoscaling policy, to compare Manta's with. It serves no requests.

It follows the source of Ray 2.60; each of these steps is a function here:

* `ray/serve/autoscaling_policy.py`: `_core_replica_queue_length_policy` (replicas = ongoing requests /
  `target_ongoing_requests`), `_apply_scaling_factors`, `_apply_delay_logic`,
  `_get_cold_start_scale_up_replicas`;
* `ray/serve/_private/replica.py`: `start_metrics_pusher` (a sample each min(0.2 x `look_back_period_s`,
  `metrics_interval_s`), sent each `metrics_interval_s`, as far back as `look_back_period_s`);
* `ray/serve/_private/autoscaling_state.py`: `_merge_and_aggregate_timeseries` (the mean over time of all
  replicas' sum, from the youngest replica's first sample until now).

`test_ray_scaling.py` compares it with that source. Called by the simulated fleet (`replica_set.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manta.cluster.errors import ConfigError

RECORD_FACTOR = 0.2  # RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
_DELAY_EPS_S = 1e-6  # _DELAY_ELAPSED_EPS_S
_MIN_S = 1e-3  # minimum length of the averaged time
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """`autoscaling_config` of Ray Serve, with its field names and defaults."""

    target_ongoing_requests: float = 2.0
    metrics_interval_s: float = 10.0
    look_back_period_s: float = 30.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None

    def __post_init__(self) -> None:
        if not self.target_ongoing_requests > 0.0:
            raise ConfigError(
                f"target_ongoing_requests={self.target_ongoing_requests:g} must be above 0.",
                param="target_ongoing_requests",
            )


class RayScaling:
    """The default policy of one deployment, with its state."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._counter = 0
        self._since_s: float | None = None

    def wanted(self, total: float, there: int, target: int, minimum: int, maximum: int, now_s: float) -> int:
        """Return the number of replicas that there should be.

        Args:
            total: ongoing requests, as `OngoingRequests.total` returns them.
            there: serving replicas.
            target: the previous return value.
            minimum, maximum: bounds of the return value.
        """
        return min(max(self._unbounded(total, there, target, now_s), minimum), maximum)

    def _unbounded(self, total: float, there: int, target: int, now_s: float) -> int:
        if there == 0 and total > 0:
            return max(math.ceil(self._settings.upscaling_factor), target)
        desired = target if there == 0 else there * (total / (self._settings.target_ongoing_requests * there))
        scaled = self._scaled(desired, there)
        return scaled if there == 0 and scaled > 0 else self._delayed(max(0, scaled), target, now_s)

    def _scaled(self, desired: float, there: int) -> int:
        if there == 0:
            return math.ceil(desired)
        settings, delta = self._settings, desired - there
        factor = settings.upscaling_factor if delta > 0 else settings.downscaling_factor
        scaled = math.ceil(there + factor * delta)
        stuck = math.ceil(desired) < there and scaled == there
        return scaled - 1 if stuck else scaled

    def _delayed(self, desired: int, target: int, now_s: float) -> int:
        settings = self._settings
        if desired == target:
            self._counter, self._since_s = 0, None
            return target
        direction = 1 if desired > target else -1
        if self._counter * direction < 0:
            self._counter, self._since_s = 0, None
        self._counter += direction
        if self._since_s is None:
            self._since_s = now_s
        delay_s = settings.upscale_delay_s
        if direction < 0:
            to_zero_s = settings.downscale_to_zero_delay_s
            delay_s = to_zero_s if target == 1 and to_zero_s is not None else settings.downscale_delay_s
            desired = desired if target == 1 else max(1, desired)
        if now_s - self._since_s + _DELAY_EPS_S < delay_s:
            return target
        self._counter, self._since_s = 0, None
        return desired


class OngoingRequests:
    """The ongoing requests as Serve's controller sees them: samples, sent at intervals.

    Simplified: all replicas take their samples at the same moments, and one report has all of them.
    """

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._record_s = min(RECORD_FACTOR * settings.look_back_period_s, settings.metrics_interval_s)
        self._next_record_s = self._next_push_s = 0.0
        self._samples: dict[int, deque[Point]] = {}
        self._reported: dict[int, list[Point]] = {}

    def observe(self, ongoing: Mapping[int, int], now_s: float) -> None:
        """Record the current number of requests of each replica, by its id."""
        if now_s >= self._next_record_s:
            self._next_record_s = now_s + self._record_s
            for replica in self._samples.keys() - ongoing.keys():
                del self._samples[replica]
            for replica, requests in ongoing.items():
                self._samples.setdefault(replica, deque()).append((now_s, requests))
        if now_s >= self._next_push_s:
            self._next_push_s = now_s + self._settings.metrics_interval_s
            self._report(now_s - self._settings.look_back_period_s)

    def _report(self, since_s: float) -> None:
        for points in self._samples.values():
            while points[0][0] <= since_s:
                points.popleft()
        self._reported = {replica: list(points) for replica, points in self._samples.items()}

    def total(self, replicas: Collection[int], now_s: float) -> float:
        """Return the mean number of requests of `replicas`, over the time for which all of them reported."""
        series = [self._reported[replica] for replica in replicas if replica in self._reported]
        changes = {at_s for points in series for at_s in _changes(points)}
        if len(series) == 1:
            begin_s = series[0][0][0]
        elif changes:
            all_s = max(points[0][0] for points in series)
            begin_s = max(all_s, min(changes)) if all_s <= max(changes) else min(changes)
        else:
            return 0.0
        seconds = max(now_s - begin_s, _MIN_S)
        return sum(_area(points, begin_s, begin_s + seconds) for points in series) / seconds


def _changes(points: list[Point]) -> list[float]:
    """Return the times at which the value changed. It is 0 before the first point."""
    values = [0.0, *(value for _, value in points)]
    return [at_s for (at_s, value), before in zip(points, values, strict=False) if value != before]


def _area(points: list[Point], begin_s: float, end_s: float) -> float:
    """Return the integral of the step function from `begin_s` to `end_s`."""
    area, until_s = 0.0, end_s
    for at_s, value in reversed(points):
        area += value * (until_s - max(at_s, begin_s))
        if at_s <= begin_s:
            break
        until_s = at_s
    return area
