"""MiniMax-M2: queries and keys normed over all heads, part of each head rotated, experts in all layers.

    q = norm(W_q u), k = norm(W_k u) over all heads;  x += o(attention(q, k, v))
    s = sigmoid(W u) in fp32;  the top k of s + correction;  x += sum of  s_e / (sum of these s) expert_e(u)

Sources: transformers' modeling_minimax_m2.py and configuration_minimax_m2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator

from ....drafter.compute.checkpoint.hf_config import Count, ExpertCount, Json, Off, parse, wrong
from ....drafter.compute.layers.moe import MoeRouter
from ....drafter.compute.layers.rope import RopeConfig
from ..model.mlp_spec import RoutedMLP
from ..model.model_spec import LayerSpec, ModelSpec, TensorRule
from .shared.llama_like import TENSORS, PlainConfig, model_of

_THETA = 5e6


def _check_softmax_layers(kinds: tuple[int, ...]) -> tuple[int, ...]:
    if set(kinds) - {1}:
        raise ValueError("must be all 1: linear attention is not served")
    return kinds


class MiniMaxM2Config(PlainConfig):
    head_dim: Count | None = 128
    num_key_value_heads: Count | None = 8
    num_local_experts: ExpertCount = 256
    num_experts_per_tok: Count = 8
    # Keys of published files that transformers does not have; only these values are supported.
    scoring_func: Literal["sigmoid"] = "sigmoid"
    qk_norm_type: Literal["per_layer"] = "per_layer"
    use_qk_norm: Literal[True] = True
    use_routing_bias: Literal[True] = True
    shared_intermediate_size: Off = False
    attn_type_list: Annotated[tuple[int, ...], AfterValidator(_check_softmax_layers)] = ()

    def routed(self, file: str) -> RoutedMLP:
        if self.num_experts_per_tok > self.num_local_experts:
            wanted = f"at most {self.num_local_experts} (num_local_experts)"
            raise wrong(file, "num_experts_per_tok", self.num_experts_per_tok, wanted)
        router = MoeRouter(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            score="sigmoid",
            correction=True,
        )
        return RoutedMLP(router=router, inner_size=self.intermediate_size)


_MOE = "layers.{layer}.block_sparse_moe."
_EXPERT = _MOE + "experts.{expert}."
_TENSORS: Mapping[str, TensorRule] = {
    **TENSORS,
    "q_norm": replace(TENSORS["q_norm"], axes=("q",)),
    "k_norm": replace(TENSORS["k_norm"], axes=("kv",)),
    "router": TensorRule(name=_MOE + "gate.weight", axes=("experts", "hidden"), is_fp32=True),
    "router_correction": TensorRule(name=_MOE + "e_score_correction_bias", axes=("experts",), is_fp32=True),
    "expert_gate": TensorRule(name=_EXPERT + "w1.weight", axes=("expert_inner", "hidden")),
    "expert_up": TensorRule(name=_EXPERT + "w3.weight", axes=("expert_inner", "hidden")),
    "expert_down": TensorRule(name=_EXPERT + "w2.weight", axes=("hidden", "expert_inner")),
}


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(MiniMaxM2Config, raw, file)
    size = config.head_size(file)
    rope = RopeConfig.read(raw, size, file, default_theta=_THETA)
    attention = replace(config.plain_attention(file, rope, size), row_norm=True)
    layer = LayerSpec(mixer=attention, mlp=config.routed(file))
    return model_of(config, (layer,) * config.num_hidden_layers, _TENSORS)
