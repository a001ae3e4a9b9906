"""Derives `ExecutorInfo`, facts for the scheduler, from resolved settings. Called by `rank_loader.py`."""

from __future__ import annotations

from dataclasses import replace

from ....cluster.step.executor import ExecutorInfo
from .resolved_config import ResolvedConfig


def executor_info(
    resolved: ResolvedConfig,
    num_pages: tuple[int, ...],
    num_states: int | None,
    *,
    has_grammars: bool,
) -> ExecutorInfo:
    info = ExecutorInfo(
        num_pages=num_pages,
        num_states=num_states,
        page_groups=resolved.pages.groups,
        page_size=resolved.page_size,
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.target.vocab_size,
        eos_token_ids=resolved.target.eos_token_ids,
        num_speculative_tokens=resolved.num_speculative_tokens,
        dtype=str(resolved.dtype).removeprefix("torch."),
        device=resolved.device.type,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_in_flight=2 if _runs_ahead(resolved) or resolved.split else 1,
        halves=resolved.split,
        has_grammars=has_grammars,
        draft_shape=resolved.draft_shape,
    )
    return _with_device_limits(info, resolved) if resolved.runs_on_device else info


def _with_device_limits(info: ExecutorInfo, resolved: ResolvedConfig) -> ExecutorInfo:
    from ....drafter.step.gpu_triton.request_states import MAX_STOP_TOKEN_IDS
    from ....drafter.step.gpu_triton.sampling.sampling_metadata import RULE_LIMITS
    from ..runners.cuda_graphs import StepKinds

    kinds = StepKinds(*resolved.step_sizes)
    return replace(
        info, max_stop_token_ids=MAX_STOP_TOKEN_IDS, rule_limits=RULE_LIMITS, row_buckets=kinds.rows
    )


def _runs_ahead(resolved: ResolvedConfig) -> bool:
    """Return whether a step starts before the last one ends: as set, or if a GPU drives the steps.

    Copies of suffix decoding are made on the host, which must know the last step's tokens.
    """
    spec = resolved.config.speculative_config
    if resolved.runs_on_device and spec is not None and spec.copies_suffixes:
        return False
    if resolved.config.async_scheduling is not None:
        return resolved.config.async_scheduling
    return resolved.device.type == "cuda" and resolved.runs_on_device


def device_limits(resolved: ResolvedConfig) -> tuple[int, int]:
    """Return the largest number of requests in a step, and of rows that sample a token."""
    max_requests, _, max_rows, _ = resolved.step_sizes
    return max_requests, min(max_requests * (1 + resolved.max_drafts), max_rows)
