"""GLM-4.5, 4.6 and 4.7: routed experts and a shared expert, dense first layers, half of each head rotated.

    x += o(attention(norm x));  x += shared(u) + sum over the chosen of  w_e expert_e(u),   u = norm x

Of the layers for multi-token prediction, which follow the others, the first is read.
Sources: transformers' modeling_glm4_moe.py and configuration_glm4_moe.py.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.deepseek_moe import EXPERT_TENSORS, SigmoidExpertsConfig
from .shared.llama_like import read_plain

_ROTARY_FACTOR = 0.5  # rotated share of a head if config.json does not say


class Glm4MoeConfig(SigmoidExpertsConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_shared_experts: int | None = 1
    first_k_dense_replace: int = Field(1, ge=0, description="an integer that is not negative")


def read(raw: Json, file: str) -> ModelSpec:
    raw = {"partial_rotary_factor": _ROTARY_FACTOR, **raw}
    config = parse(Glm4MoeConfig, raw, file)
    routed, dense = config.routed(file), config.first_k_dense_replace
    plain = read_plain(raw, file, config, qk_norm=config.use_qk_norm, bias=config.attention_bias)
    layers = tuple(layer if i < dense else replace(layer, mlp=routed) for i, layer in enumerate(plain.layers))
    mtp = config.mtp(replace(plain.layers[-1], mlp=routed))
    return replace(plain, layers=layers, tensors=EXPERT_TENSORS, mtp=mtp)
