"""Qwen3 with routed experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B): Qwen3 but for its MLPs.

    x += sum of the k best p_e down_e(silu(gate_e u) * up_e u),   p = softmax(W u), divided by their sum

Sources: transformers' modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import AliasChoices, Field

from ....drafter.compute.config_json import Count, Json, parse, wrong
from ....drafter.compute.experts import Router
from ..model.spec import LayerSpec, ModelSpec, RoutedMLP, TensorRule
from .plain import TENSORS
from .qwen3 import Qwen3Config, read_dense_qwen3


class Qwen3MoeConfig(Qwen3Config):
    """config.json of Qwen3MoeForCausalLM; the defaults are transformers'."""

    num_experts: Count = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def has_experts(self, layer: int) -> bool:
        """Every `decoder_sparse_step`-th layer, but those that are listed."""
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in (self.mlp_only_layers or ())


_EXPERT = "layers.{layer}.mlp.experts."
_TENSORS: Mapping[str, TensorRule] = {
    **TENSORS,
    "router": TensorRule(name="layers.{layer}.mlp.gate.weight", axes=("experts", "hidden")),
    "expert_gate": TensorRule(name=_EXPERT + "{expert}.gate_proj.weight", axes=("expert_inner", "hidden")),
    "expert_up": TensorRule(name=_EXPERT + "{expert}.up_proj.weight", axes=("expert_inner", "hidden")),
    "expert_down": TensorRule(name=_EXPERT + "{expert}.down_proj.weight", axes=("hidden", "expert_inner")),
    "experts_gate_up": TensorRule(name=_EXPERT + "gate_up_proj", axes=("expert", "expert_gate_up", "hidden")),
    "experts_down": TensorRule(name=_EXPERT + "down_proj", axes=("expert", "hidden", "expert_inner")),
}


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3MoeConfig, raw, file)
    chosen, there = config.num_experts_per_tok, config.num_experts
    if chosen > there:
        raise wrong(file, "num_experts_per_tok", chosen, f"at most num_experts ({there})")
    router = Router(
        num_experts=there,
        top_k=chosen,
        score="softmax",
        renormalize=config.norm_topk_prob,
    )
    routed = RoutedMLP(router=router, inner_size=config.moe_intermediate_size)

    def of(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=routed) if config.has_experts(index) else layer

    dense = read_dense_qwen3(raw, file, config)
    layers = tuple(of(i, layer) for i, layer in enumerate(dense.layers))
    return replace(dense, layers=layers, tensors=_TENSORS)
