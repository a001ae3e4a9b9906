"""Metric values of an engine, read from `EngineStats` and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_core import EngineStats
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ...cluster.step.executor import ExecutorInfo
from ..checkpoints.checkpoint_paths import drafter_commit
from ..engine.async_engine import AsyncEngine
from .prometheus_text import Values


def engine_values(stats: EngineStats, speedup: float | None) -> dict[str, Values]:
    drafts = stats.num_drafts
    length = mean_acceptance_length(drafts, stats.num_accepted_tokens)
    return {
        **_load_values(stats),
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generation_tokens,
        "vllm:request_success": _by_name(stats.finished),
        "vllm:iteration_tokens_total": stats.step_tokens,
        "vllm:prefix_cache_queries": stats.prefix_cache_queries,
        "vllm:prefix_cache_hits": stats.prefix_cache_hits,
        "vllm:prompt_tokens_cached": stats.prefix_cache_hits,
        "vllm:num_preemptions": stats.preemptions,
        "vllm:kv_block_lifetime_seconds": stats.page_lifetimes,
        "vllm:kv_block_idle_before_evict_seconds": stats.page_idle_times,
        "vllm:kv_block_reuse_gap_seconds": stats.page_reuse_gaps,
        "vllm:spec_decode_num_drafts": drafts,
        "vllm:spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "vllm:spec_decode_num_accepted_tokens_per_pos": _by_place(stats.accepted_per_pos),
        "vllm:spec_decode_mean_accepted_length": _value_or_nan(length),
        "dflash:spec_proposed_tokens": stats.num_proposed_tokens,
        "dflash:spec_trimmed_tokens": stats.num_trimmed_tokens,
        "dflash:spec_branch_tokens": stats.num_branch_tokens,
        "dflash:spec_accepted_branch_tokens": stats.num_accepted_branch_tokens,
        "dflash:spec_trees": stats.num_trees,
        "dflash:spec_tree_depth": stats.tree_depths,
        "dflash:spec_tree_width": stats.tree_widths,
        "dflash:spec_wasted_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        "dflash:target_rows": stats.target_rows,
        "dflash:spec_calibration_error": _by_place(stats.calibration_error),
        "dflash:spec_num_speculative_tokens": float(stats.draft_length) if stats.accepted_per_pos else {},
        "dflash:spec_disabled_seconds": _by_name(stats.undrafted_s),
        "dflash:spec_speculating_seconds": stats.speculating_s,
        "dflash:spec_plain_seconds": stats.plain_s,
        "dflash:spec_speedup_ratio": _value_or_nan(speedup),
        "dflash:steps": stats.steps,
        "dflash:step_seconds": _by_name(stats.step_seconds),
        "manta:experts_read": stats.experts_read,
        "manta:routed_layers": stats.routed_layers,
        "manta:drafter_up": float(stats.drafter_up) if stats.accepted_per_pos else {},
        "manta:drafter_losses": stats.drafter_losses,
        "manta:drafter_skipped_passes": stats.skipped_passes,
        "manta:drafter_refilled_tokens": stats.drafter_refilled_tokens,
        "manta:drafter_rests": stats.drafter_rests,
        "manta:drafter_unwritten_tokens": stats.drafter_unwritten_tokens,
        "manta:drafter_served_steps": stats.drafter_use.steps,
        "manta:drafter_queue_seconds": stats.drafter_use.queue_s,
        "manta:drafter_served_seconds": stats.drafter_use.served_s,
    }


def _load_values(stats: EngineStats) -> dict[str, Values]:
    return {
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:num_requests_waiting_by_reason": {
            ("capacity",): stats.waiting - stats.background_waiting,
            ("deferred",): stats.background_waiting,
        },
        "vllm:engine_sleep_state": {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0},
        "vllm:kv_cache_usage_perc": stats.kv_usage,
        "dflash:batch_rows_running": stats.background_running,
        "dflash:batch_rows_waiting": stats.background_waiting,
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


def _by_name(counts: Mapping[Any, float]) -> dict[tuple[str, ...], float]:  # Any: names of some literal type
    return {(name,): count for name, count in counts.items()}


def _by_place(values: tuple[float, ...]) -> dict[tuple[str, ...], float]:
    return {(str(i),): value for i, value in enumerate(values)}


def _value_or_nan(value: float | None) -> Values:
    return {} if value is None else value
