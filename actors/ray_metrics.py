"""A few of the engine's figures in Ray's own metrics, where they add up over replicas.

Kept to what a total needs; everything else is on each replica's `/metrics`. Ray shows them as `ray_vllm_...`
with a delay of about ten seconds. Created in the replica, fed by `telemetry.py`.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from ..cluster.engine import EngineStats

# Ray's name -> EngineStats field. Ray drops names with a colon, hence vllm_.
GAUGES = {
    "vllm_num_requests_running": "running",
    "vllm_num_requests_waiting": "waiting",
    "vllm_kv_cache_usage_perc": "kv_usage",
}
COUNTERS = {
    "vllm_prompt_tokens_total": "prompt_tokens",
    "vllm_generation_tokens_total": "generation_tokens",
    "vllm_num_preemptions_total": "preemptions",
    "vllm_spec_decode_num_drafts_total": "num_drafts",
    "vllm_spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm_spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
}


class RayMetrics:
    """A `StatsMirror` into Ray.

    Args:
        model_name, replica: become the tags `model_name` and `ReplicaId`.
    """

    def __init__(self, model_name: str, replica: str) -> None:
        tags = {"model_name": model_name, "ReplicaId": replica}
        keys = tuple(tags)
        self._gauges = {field: Gauge(name, tag_keys=keys) for name, field in GAUGES.items()}
        self._counters = {field: Counter(name, tag_keys=keys) for name, field in COUNTERS.items()}
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self._shown = dict.fromkeys(self._counters, 0)

    def update(self, stats: EngineStats) -> None:
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            now = getattr(stats, field)
            if now > self._shown[field]:
                counter.inc(now - self._shown[field])
                self._shown[field] = now
