"""GLM-4.5, 4.6 and 4.7: routed experts beside a shared one, dense first layers, half of each head rotated.

    x += o(attention(norm x));  x += shared(u) + sum over the chosen of  w_e expert_e(u),   u = norm x

Layers behind the last that predict further tokens (`num_nextn_predict_layers`) are not read: that is the
drafter's part.

Sources: transformers' modeling_glm4_moe.py and configuration_glm4_moe.py.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from ....drafter.compute.config_json import Json, parse
from ..model.spec import ModelSpec
from .plain import read_plain
from .sigmoid_experts import EXPERT_TENSORS, SigmoidExpertsConfig

_ROTATED = 0.5  # of a head, where config.json is silent


class Glm4MoeConfig(SigmoidExpertsConfig):
    """config.json of Glm4MoeForCausalLM; the defaults are transformers'."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_shared_experts: int | None = 1
    first_k_dense_replace: int = Field(1, ge=0, description="an integer that is not negative")


def read(raw: Json, file: str) -> ModelSpec:
    raw = {"partial_rotary_factor": _ROTATED, **raw}
    config = parse(Glm4MoeConfig, raw, file)
    routed, dense = config.routed(file), config.first_k_dense_replace
    plain = read_plain(raw, file, config, qk_norm=config.use_qk_norm, bias=config.attention_bias)
    layers = tuple(layer if i < dense else replace(layer, mlp=routed) for i, layer in enumerate(plain.layers))
    return replace(plain, layers=layers, tensors=EXPERT_TENSORS)
