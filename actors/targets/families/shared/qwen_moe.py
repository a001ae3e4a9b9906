"""Experts chosen by the softmax of a router, as in Qwen's families: their keys and tensor names.

    sum of the k best p_e down_e(silu(gate_e u) * up_e u) [+ sigmoid(w u) shared(u)],   p = softmax(W u)

The weights may be divided by their sum. `deepseek_moe.py` has DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AliasChoices, Field

from .....drafter.compute.checkpoint.hf_config import Count, ExpertCount, wrong
from .....drafter.compute.layers.moe import MoeRouter
from ...model.mlp_spec import GatedMLP, RoutedMLP
from ...model.model_spec import TensorRule
from .llama_like import PlainConfig


class SoftmaxExpertsConfig(PlainConfig):
    num_experts: ExpertCount = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0)] | None = None  # 0: no shared expert

    def mlps(self, file: str) -> tuple[RoutedMLP | GatedMLP, ...]:
        """Return each layer's MLP: every `decoder_sparse_step`-th has experts, except those listed."""
        routed, dense = self._routed(file), GatedMLP(inner_size=self.intermediate_size)
        listed, step = self.mlp_only_layers or (), self.decoder_sparse_step
        return tuple(
            routed if (layer + 1) % step == 0 and layer not in listed else dense
            for layer in range(self.num_hidden_layers)
        )

    def _routed(self, file: str) -> RoutedMLP:
        top_k, num_experts = self.num_experts_per_tok, self.num_experts
        if top_k > num_experts:
            raise wrong(file, "num_experts_per_tok", top_k, f"at most num_experts ({num_experts})")
        router = MoeRouter(
            num_experts=num_experts, top_k=top_k, score="softmax", renormalize=self.norm_topk_prob
        )
        shared = self.shared_expert_intermediate_size
        return RoutedMLP(
            router=router,
            inner_size=self.moe_intermediate_size,
            shared=GatedMLP(inner_size=shared) if shared else None,
            shared_gate=bool(shared),
        )


_MLP = "layers.{layer}.mlp."
_EXPERT, _SHARED = _MLP + "experts.", _MLP + "shared_expert."
EXPERT_TENSORS: Mapping[str, TensorRule] = {
    "router": TensorRule(name=_MLP + "gate.weight", axes=("experts", "hidden")),
    "expert_gate": TensorRule(name=_EXPERT + "{expert}.gate_proj.weight", axes=("expert_inner", "hidden")),
    "expert_up": TensorRule(name=_EXPERT + "{expert}.up_proj.weight", axes=("expert_inner", "hidden")),
    "expert_down": TensorRule(name=_EXPERT + "{expert}.down_proj.weight", axes=("hidden", "expert_inner")),
    "experts_gate_up": TensorRule(name=_EXPERT + "gate_up_proj", axes=("expert", "expert_gate_up", "hidden")),
    "experts_down": TensorRule(name=_EXPERT + "down_proj", axes=("expert", "hidden", "expert_inner")),
}
# For families with a shared expert.
SHARED_TENSORS: Mapping[str, TensorRule] = {
    "shared_gate": TensorRule(name=_SHARED + "gate_proj.weight", axes=("shared", "hidden")),
    "shared_up": TensorRule(name=_SHARED + "up_proj.weight", axes=("shared", "hidden")),
    "shared_down": TensorRule(name=_SHARED + "down_proj.weight", axes=("hidden", "shared")),
    "shared_weight": TensorRule(name=_MLP + "shared_expert_gate.weight", axes=("one", "hidden")),
}
