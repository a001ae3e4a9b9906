"""Qwen3.5, 3.6 and 3.8, text: gated delta nets and gated attention (`gated_delta_net.py`), optionally with
experts.

Parts of a published file for images and multi-token prediction are ignored.

Sources: transformers' modeling_qwen3_5.py and modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import AliasChoices, Field

from ....drafter.compute.checkpoint.hf_config import Count, Json, parse
from ..model.mlp_spec import GatedMLP
from ..model.model_spec import ModelSpec, TensorRule
from .gated_delta_net import DELTA, GatedDeltaConfig, read_gated_delta
from .shared.qwen_moe import EXPERT_TENSORS, SHARED_TENSORS, SoftmaxExpertsConfig


class Qwen35MoeConfig(GatedDeltaConfig, SoftmaxExpertsConfig):
    """The text part of the config.json of a Qwen3.5 with experts in every layer."""

    intermediate_size: Count = 1  # no layer has a dense MLP
    num_experts: Count = Field(256, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count | None = 512


_PROJECTIONS: Mapping[str, TensorRule] = {
    "delta_qkv": TensorRule(name=DELTA + "in_proj_qkv.weight", axes=("delta_channels", "hidden")),
    "delta_z": TensorRule(name=DELTA + "in_proj_z.weight", axes=("delta_values", "hidden")),
    "delta_b": TensorRule(name=DELTA + "in_proj_b.weight", axes=("delta_heads", "hidden")),
    "delta_a": TensorRule(name=DELTA + "in_proj_a.weight", axes=("delta_heads", "hidden")),
}


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(GatedDeltaConfig, raw, file)
    mlps = (GatedMLP(inner_size=config.intermediate_size),) * config.num_hidden_layers
    return read_gated_delta(raw, file, config, mlps, _PROJECTIONS)


def read_moe(raw: Json, file: str) -> ModelSpec:
    # These families always divide the chosen experts' weights by their sum.
    config = parse(Qwen35MoeConfig, {**raw, "norm_topk_prob": True}, file)
    tensors = {**_PROJECTIONS, **EXPERT_TENSORS, **SHARED_TENSORS}
    return read_gated_delta(raw, file, config, config.mlps(file), tensors)
