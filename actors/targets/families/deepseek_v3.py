"""DeepSeek-V3 and Kimi K2: latent attention, dense first layers, then routed experts and a shared expert.

    x += o(attention over latents(norm x));  x += shared(u) + sum over the chosen of  w_e expert_e(u)

Part of each head is rotated, in pairs 2c, 2c + 1 as published. With yarn, scores have a factor in addition to
that of cosines and sines. The epsilon of the bottlenecks' norms is not in config.json. Of the layers for
multi-token prediction, which follow the others, the first is read; of Kimi K2.5 and later only the text part.

Sources: transformers' modeling_deepseek_v3.py, modeling_layers.py, configuration_{deepseek_v3,kimi_k25}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field

from ....drafter.compute.checkpoint.hf_config import Count, Json, Off, parse, wrong
from ....drafter.compute.layers.rope import RopeConfig
from ..model.attention import Latent, TargetAttention
from ..model.mlp_spec import GatedMLP
from ..model.model_spec import LayerSpec, ModelSpec, TensorRule
from .shared.deepseek_moe import EXPERT_TENSORS, SigmoidExpertsConfig
from .shared.llama_like import model_of

_BOTTLENECK_EPS = 1e-6  # as in the publishers' code and in transformers


class DeepseekV3Config(SigmoidExpertsConfig):
    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_interleave: bool = True
    n_shared_experts: int | None = 1
    first_k_dense_replace: int = Field(3, ge=0, description="an integer that is not negative")
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: float = 2.5
    # Other values of these keys would change the mathematics.
    attention_bias: Off = False
    index_topk: Off = False
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    def attention(self, raw: Json, file: str) -> TargetAttention:
        rotated, rank = self.qk_rope_head_dim, self.kv_lora_rank
        if rotated % 2:
            raise wrong(file, "qk_rope_head_dim", rotated, "even")
        rope = RopeConfig.read(raw, rotated, file)
        return TargetAttention(
            num_heads=self.num_attention_heads,
            num_kv_heads=1,
            head_dim=rank + rotated,
            v_head_dim=rank,
            rope=replace(rope, interleaved=self.rope_interleave),
            scale=(self.qk_nope_head_dim + rotated) ** -0.5 * rope.score_scale,
            latent=Latent(
                q_rank=self.q_lora_rank,
                nope_dim=self.qk_nope_head_dim,
                v_dim=self.v_head_dim,
                eps=_BOTTLENECK_EPS,
            ),
        )


_ATTENTION = "layers.{layer}.self_attn."
_TENSORS: Mapping[str, TensorRule] = {
    **EXPERT_TENSORS,
    "q_down": TensorRule(name=_ATTENTION + "q_a_proj.weight", axes=("q_rank", "hidden")),
    "q_down_norm": TensorRule(name=_ATTENTION + "q_a_layernorm.weight", axes=("q_rank",)),
    "q_up": TensorRule(name=_ATTENTION + "q_b_proj.weight", axes=("q", "q_rank")),
    "kv_down": TensorRule(name=_ATTENTION + "kv_a_proj_with_mqa.weight", axes=("latent_key", "hidden")),
    "kv_down_norm": TensorRule(name=_ATTENTION + "kv_a_layernorm.weight", axes=("latent",)),
    "kv_up": TensorRule(name=_ATTENTION + "kv_b_proj.weight", axes=("latent_heads", "latent")),
}


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(DeepseekV3Config, raw, file)
    attention, routed = config.attention(raw, file), config.routed(file)
    dense = GatedMLP(inner_size=config.intermediate_size)
    layers = tuple(
        LayerSpec(mixer=attention, mlp=dense if i < config.first_k_dense_replace else routed)
        for i in range(config.num_hidden_layers)
    )
    return replace(model_of(config, layers, _TENSORS), mtp=config.mtp(LayerSpec(mixer=attention, mlp=routed)))
