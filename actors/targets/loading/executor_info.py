"""Derives `ExecutorInfo`, facts for the scheduler, from a loaded plan. Called by `rank_loader.py`."""

from __future__ import annotations

from dataclasses import replace

from ....cluster.step.executor import ExecutorInfo
from .load_plan import LoadPlan


def executor_info(
    plan: LoadPlan,
    num_pages: tuple[int, ...],
    num_states: int | None,
    *,
    has_grammars: bool,
) -> ExecutorInfo:
    info = ExecutorInfo(
        num_pages=num_pages,
        num_states=num_states,
        page_groups=plan.pages.groups,
        page_size=plan.page_size,
        max_model_len=plan.max_model_len,
        vocab_size=plan.target.vocab_size,
        eos_token_ids=plan.target.eos_token_ids,
        num_speculative_tokens=plan.num_speculative_tokens,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=plan.device.type,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_in_flight=2 if _runs_ahead(plan) or plan.split else 1,
        halves=plan.split,
        has_grammars=has_grammars,
        tree_width=1 if plan.tree is None else plan.tree.width,
        tree_size=None if plan.tree is None else plan.tree.nodes,
    )
    return _with_device_limits(info, plan) if plan.runs_on_device else info


def _with_device_limits(info: ExecutorInfo, plan: LoadPlan) -> ExecutorInfo:
    from ....drafter.step.gpu_triton.request_states import MAX_STOP_TOKEN_IDS
    from ....drafter.step.gpu_triton.sampling.sampling_metadata import RULE_LIMITS
    from ..runners.cuda_graphs import StepKinds

    max_requests, _ = device_limits(plan)
    kinds = StepKinds(max_requests, plan.num_speculative_tokens, plan.max_num_batched_tokens, plan.tree)
    return replace(
        info, max_stop_token_ids=MAX_STOP_TOKEN_IDS, rule_limits=RULE_LIMITS, row_buckets=kinds.rows
    )


def _runs_ahead(plan: LoadPlan) -> bool:
    """Return whether a step starts before the last one ends: as set, or if a GPU drives the steps.

    Copies of suffix decoding are made on the host, which must know the last step's tokens.
    """
    spec = plan.config.speculative_config
    if plan.runs_on_device and spec is not None and spec.copies_suffixes:
        return False
    if plan.config.async_scheduling is not None:
        return plan.config.async_scheduling
    return plan.device.type == "cuda" and plan.runs_on_device


def num_tree_values(plan: LoadPlan) -> int:
    """Return the int32 values of a request's tree, as a device grows it; 0 without such trees."""
    if plan.tree is None or not plan.runs_on_device:
        return 0
    from ....drafter.step.gpu_triton.draft_trees import DeviceTrees

    return DeviceTrees.num_values(plan.tree)


def device_limits(plan: LoadPlan) -> tuple[int, int]:
    """Return the largest number of requests in a step, and of rows that sample a token."""
    max_requests, budget = plan.config.max_num_seqs, plan.max_num_batched_tokens
    return min(max_requests, budget), min(max_requests * (1 + plan.max_drafts), budget)
