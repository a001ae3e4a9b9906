"""A few of the engine's figures in Ray's own metrics, where they add up over replicas.

Kept to what a total needs; everything else is on each replica's `/metrics`. Ray drops names with a colon: it
shows `vllm:...` as `ray_vllm_...`, with a delay of about ten seconds. Created in the replica, fed by
`telemetry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from ..cluster.engine import EngineStats
from ..cluster.metrics import CATALOGUE
from .telemetry import engine_values

MIRRORED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)


class RayMetrics:
    """A `StatsMirror` into Ray.

    Args:
        model_name, replica: become the tags `model_name` and `ReplicaId`.
    """

    def __init__(self, model_name: str, replica: str) -> None:
        tags = {"model_name": model_name, "ReplicaId": replica}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        for metric in (metric for metric in CATALOGUE if metric.name in MIRRORED):
            name = metric.name.replace(":", "_")
            if metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(name, metric.help, tuple(tags))
            else:
                self._counters[metric.name] = Counter(f"{name}_total", metric.help, tuple(tags))
        for mirrored in (*self._gauges.values(), *self._counters.values()):
            mirrored.set_default_tags(tags)
        self._shown = dict.fromkeys(self._counters, 0.0)

    def update(self, stats: EngineStats) -> None:
        found = engine_values(stats)
        values = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        for name, counter in self._counters.items():
            if values[name] > self._shown[name]:
                counter.inc(values[name] - self._shown[name])
                self._shown[name] = values[name]
