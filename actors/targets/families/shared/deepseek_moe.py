"""Parts that GLM-4.x and MiMo share: DeepSeek-V3's routed experts, their keys and tensor names.

    s = sigmoid(W u) in fp32;  the top k of s + correction, of the best groups;  weights s / sum s * scale

Sources: transformers' modeling_glm4_moe.py and modeling_mimo_v2_flash.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import AliasChoices, Field

from .....drafter.compute.checkpoint.hf_config import Count, ExpertCount, wrong
from .....drafter.compute.layers.moe import MoeRouter
from ...model.mlp_spec import GatedMLP, RoutedMLP
from ...model.model_spec import LayerSpec, MtpSpec, TensorRule
from .llama_like import TENSORS, PlainConfig


class SigmoidExpertsConfig(PlainConfig):
    n_routed_experts: ExpertCount
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count
    n_shared_experts: int | None = None
    norm_topk_prob: bool = True
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: float = 1.0
    num_mtp_layers: int = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers"),
        description="an integer that is not negative",
    )

    def mtp(self, layer: LayerSpec) -> MtpSpec | None:
        """Return the first layer for multi-token prediction, the one after the target's last."""
        if not self.num_mtp_layers:
            return None
        prefix = f"layers.{self.num_hidden_layers}."
        return MtpSpec.after_body(layer, prefix, "shared_head.norm.weight")

    def routed(self, file: str) -> RoutedMLP:
        experts, inner = self.n_routed_experts, self.moe_intermediate_size
        if self.num_experts_per_tok > experts:
            wanted = f"at most {experts} (n_routed_experts)"
            raise wrong(file, "num_experts_per_tok", self.num_experts_per_tok, wanted)
        if experts % self.n_group:
            raise wrong(file, "n_group", self.n_group, f"a divisor of n_routed_experts ({experts})")
        if self.topk_group > self.n_group:
            raise wrong(file, "topk_group", self.topk_group, f"at most {self.n_group} (n_group)")
        router = MoeRouter(
            num_experts=experts,
            top_k=self.num_experts_per_tok,
            score="sigmoid",
            renormalize=self.norm_topk_prob,
            correction=True,
            groups=self.n_group,
            top_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )
        shared = GatedMLP(inner_size=inner * self.n_shared_experts) if self.n_shared_experts else None
        return RoutedMLP(router=router, inner_size=inner, shared=shared)


_MLP = "layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

EXPERT_TENSORS: Mapping[str, TensorRule] = {
    **TENSORS,
    "router": TensorRule(name=_MLP + "gate.weight", axes=("experts", "hidden"), is_fp32=True),
    "router_correction": TensorRule(
        name=_MLP + "gate.e_score_correction_bias", axes=("experts",), is_fp32=True
    ),
    "expert_gate": TensorRule(name=_EXPERT + "gate_proj.weight", axes=("expert_inner", "hidden")),
    "expert_up": TensorRule(name=_EXPERT + "up_proj.weight", axes=("expert_inner", "hidden")),
    "expert_down": TensorRule(name=_EXPERT + "down_proj.weight", axes=("hidden", "expert_inner")),
    "shared_gate": TensorRule(name=_MLP + "shared_experts.gate_proj.weight", axes=("shared", "hidden")),
    "shared_up": TensorRule(name=_MLP + "shared_experts.up_proj.weight", axes=("shared", "hidden")),
    "shared_down": TensorRule(name=_MLP + "shared_experts.down_proj.weight", axes=("hidden", "shared")),
}
