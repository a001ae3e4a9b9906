"""Qwen3 with routed experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B).

Sources: transformers' modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import field_validator

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .qwen3 import Qwen3Config, read_dense_qwen3
from .shared.llama_like import TENSORS
from .shared.qwen_moe import EXPERT_TENSORS, SoftmaxExpertsConfig


class Qwen3MoeConfig(Qwen3Config, SoftmaxExpertsConfig):
    """config.json of Qwen3MoeForCausalLM, with transformers' defaults.

    Qwen3-Coder states that no expert is shared (0); transformers ignores the key.
    """

    @field_validator("shared_expert_intermediate_size")
    @classmethod
    def _check_no_shared_expert(cls, size: int | None) -> int | None:
        if size:
            raise ValueError("must be 0 or absent: this class has no shared expert")
        return size


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3MoeConfig, raw, file)
    dense, mlps = read_dense_qwen3(raw, file, config), config.mlps(file)
    layers = tuple(replace(layer, mlp=mlp) for layer, mlp in zip(dense.layers, mlps, strict=True))
    return replace(dense, layers=layers, tensors={**TENSORS, **EXPERT_TENSORS})
