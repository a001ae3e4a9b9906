"""Qwen3-Next (Qwen3-Coder-Next): Qwen3.5 with experts, whose delta nets' projections are grouped by key head.

    in_proj_qkvz   q k v.. z.. of the first key head and of the value heads that it serves, then of the next
    in_proj_ba     b.. a.. likewise

Sources: transformers' modeling_qwen3_next.py and configuration_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from ....drafter.compute.checkpoint.hf_config import Count, Json, parse
from ..model.model_spec import ModelSpec, TensorRule, Transform
from .gated_delta_net import DELTA, GatedDeltaConfig, read_gated_delta
from .shared.qwen_moe import EXPERT_TENSORS, SHARED_TENSORS, SoftmaxExpertsConfig


class Qwen3NextConfig(GatedDeltaConfig, SoftmaxExpertsConfig):
    num_experts: Count = Field(512, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count | None = 512
    norm_topk_prob: bool = True


def _regroup_by_kind(sizes: tuple[int, ...], rows_OH: Tensor) -> Tensor:
    """Regroup rows from key head by key head, with these sizes per kind, to kind by kind over all heads."""
    kinds = rows_OH.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])


def _tensors(config: Qwen3NextConfig) -> Mapping[str, TensorRule]:
    group = config.linear_num_value_heads // config.linear_num_key_heads
    key, values = config.linear_key_head_dim, group * config.linear_value_head_dim
    return {
        "delta_qkvz": TensorRule(
            name=DELTA + "in_proj_qkvz.weight",
            axes=("delta_qkvz", "hidden"),
            transform=Transform(_regroup_by_kind, ((key, key, values, values),)),
        ),
        "delta_ba": TensorRule(
            name=DELTA + "in_proj_ba.weight",
            axes=("delta_ba", "hidden"),
            transform=Transform(_regroup_by_kind, ((group, group),)),
        ),
    }


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3NextConfig, raw, file)
    tensors = {**_tensors(config), **EXPERT_TENSORS, **SHARED_TENSORS}
    return read_gated_delta(raw, file, config, config.mlps(file), tensors)
