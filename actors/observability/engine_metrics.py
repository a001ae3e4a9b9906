"""Metric values of an engine, read from `EngineStats` and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_stats import EngineStats
from ...cluster.metrics.engine_metrics import CATALOGUE
from ...cluster.metrics.metric import HistogramCounts
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ...cluster.step.executor import ExecutorInfo
from ..checkpoints.checkpoint_paths import drafter_commit
from ..engine.async_engine import AsyncEngine
from .prometheus_text import Values


def engine_values(stats: EngineStats, speedup: float | None) -> dict[str, Values]:
    """Return the values that depend on counts alone, by metric; the catalogue says which count."""
    length = mean_acceptance_length(stats.num_drafts, stats.num_accepted_tokens)
    return {
        **{metric.name: _by_label(attrgetter(metric.stat)(stats)) for metric in CATALOGUE if metric.stat},
        "vllm:num_requests_waiting_by_reason": {
            ("capacity",): stats.waiting - stats.background_waiting,
            ("deferred",): stats.background_waiting,
        },
        "vllm:engine_sleep_state": {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0},
        "vllm:spec_decode_mean_accepted_length": _value_or_nan(length),
        "dflash:spec_wasted_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        "dflash:spec_num_speculative_tokens": float(stats.draft_length) if stats.accepted_per_pos else {},
        "dflash:spec_speedup_ratio": _value_or_nan(speedup),
        "manta:drafter_up": float(stats.drafter_up) if stats.accepted_per_pos else {},
    }


def rejection_values(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {("queue_full",): 0, **_by_name(stats.rejected)}


def info_values(engine: AsyncEngine, stats: EngineStats) -> dict[str, Values]:
    """Return the metrics with labels that depend on the settings: K/V cache, drafters, methods."""
    return {
        "vllm:cache_config_info": {_cache_labels(engine.config, engine.info): 1.0},
        "dflash:drafter_info": _drafter_labels(engine, stats),
        **_values_by_method(engine.config, stats),
    }


def _values_by_method(config: EngineConfig, stats: EngineStats) -> dict[str, Values]:
    """Return verified and accepted drafts by method; none without speculation."""
    spec = config.speculative_config
    if spec is None:
        return {"manta:spec_draft_tokens": {}, "manta:spec_accepted_tokens": {}}
    counts = {
        "manta:spec_draft_tokens": (stats.num_draft_tokens, stats.num_copied_draft_tokens),
        "manta:spec_accepted_tokens": (stats.num_accepted_tokens, stats.num_copied_accepted_tokens),
    }
    return {
        name: {(spec.method,): total - copied} | ({("suffix",): copied} if spec.suffix_drafts else {})
        for name, (total, copied) in counts.items()
    }


def _cache_labels(config: EngineConfig, info: ExecutorInfo) -> tuple[str, ...]:
    """Label the pages for full attention, also if there are others for sliding windows."""
    pool = next((group.pool for group in info.page_groups if group.window is None), 0)
    dtype = info.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    facts = info.page_size, info.num_pages[pool], dtype, config.enable_prefix_caching
    return tuple(map(str, facts))


def _drafter_labels(engine: AsyncEngine, stats: EngineStats) -> dict[tuple[str, ...], float]:
    spec = engine.config.speculative_config
    if spec is None or engine.drafter is None:
        return {}
    size = str(engine.info.num_speculative_tokens + 1)
    revision = drafter_commit(engine.config, engine.drafter) if spec.has_model else ""
    status = "up" if stats.drafter_up else "down"
    return {(engine.drafter, revision, spec.method, size, engine.config.model, status): 1.0}


def _by_label(value: Any) -> Values:  # Any: of any field of EngineStats
    """Return a value; several with their label: a name, or a place in the list."""
    if isinstance(value, Mapping):
        return _by_name(value)
    if isinstance(value, tuple) and not isinstance(value, HistogramCounts):
        return _by_name({str(place): each for place, each in enumerate(value)})
    return value


def _by_name(counts: Mapping[Any, float]) -> dict[tuple[str, ...], float]:  # Any: names of some literal type
    return {(name,): count for name, count in counts.items()}


def _value_or_nan(value: float | None) -> Values:
    return {} if value is None else value
