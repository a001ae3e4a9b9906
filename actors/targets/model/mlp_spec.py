"""Specification of a layer's MLP: its tensors and their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from ....drafter.compute.checkpoint.packed_codes import BLOCK
from ....drafter.compute.layers.linear import Activation
from ....drafter.compute.layers.moe import ExpertActivation, MoeRouter

# Inner states are sharded over ranks; for experts either their inner states or the experts themselves.
# "inner": a dense MLP; "shared": the shared expert; "experts": the router's outputs, not sharded;
# "expert_gate_up": an expert's gate rows, then its up rows; "expert_pairs": the same rows interleaved.
MLPAxis = Literal[
    "inner",
    "experts",
    "expert",
    "expert_inner",
    "expert_gate_up",
    "expert_pairs",
    "shared",
    "expert_inner_blocks",
]
# Forms in which a checkpoint may store a layer's experts, the usual one first: a matrix per expert, one
# tensor for all, or one for all packed in MXFP4.
FUSED_EXPERTS = ("experts_gate_up", "experts_down")
PACKED_EXPERTS = (
    "experts_gate_up_blocks",
    "experts_gate_up_scales",
    "experts_down_blocks",
    "experts_down_scales",
)
EXPERT_FORMS = (("expert_gate", "expert_up", "expert_down"), FUSED_EXPERTS, PACKED_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """down(activation(gate x) * up x); `bias` applies to all three projections."""

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def dense(self) -> GatedMLP:
        return self

    @property
    def routed(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMLP:
    """Mixture of experts: a weighted sum of the gated MLPs that a router chooses for each row.

    Attributes:
        limit: clamping limit of the activation `swiglu_clamped`.
        shared: an expert of its own size that every row passes.
        shared_gate: the shared expert is weighted by sigmoid(w x).
        inner_multiple: a rank's part of the inner size must be a multiple of this (a quantization block).
    """

    router: MoeRouter
    inner_size: int
    activation: ExpertActivation = "silu"
    limit: float | None = None
    bias: bool = False
    shared: GatedMLP | None = None
    shared_gate: bool = False
    inner_multiple: int = 1

    @property
    def dense(self) -> None:
        return None

    @property
    def routed(self) -> RoutedMLP:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMlpSpec:
    """norm(dense(mlp_norm x)) + norm'(routed(norm'' x)): a dense MLP and experts in parallel (Gemma 4)."""

    dense: GatedMLP
    routed: RoutedMLP


# `dense` is the dense MLP (not a shared expert), `routed` the one with experts; either may be None.
MLP = GatedMLP | RoutedMLP | ParallelMlpSpec


def mlp_parts(mlp: MLP, expert_forms: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the names of all tensors, as keys of `ModelSpec.tensors`, with the first form of experts."""
    parts: list[str] = []
    if mlp.dense is not None:
        parts += ["gate", "up", "down"] + ["gate_bias", "up_bias", "down_bias"] * mlp.dense.bias
    if isinstance(mlp, ParallelMlpSpec):
        parts += ["dense_out_norm", "routed_norm", "routed_out_norm"]
    if (routed := mlp.routed) is not None:
        rule = routed.router
        parts += ["router"] + ["router_bias"] * rule.bias + ["router_correction"] * rule.correction
        parts += ["router_norm"] * rule.normed_input + ["expert_scale"] * rule.expert_scale
        parts += expert_forms[0]
        parts += ["experts_gate_up_bias", "experts_down_bias"] * routed.bias
        if routed.shared is not None:
            parts += ["shared_gate", "shared_up", "shared_down"] + ["shared_weight"] * routed.shared_gate
    return parts


def is_mlp_axis(axis: str) -> TypeGuard[MLPAxis]:
    return axis in get_args(MLPAxis)


def mlp_axis_size(axis: MLPAxis, mlp: MLP) -> int:
    if axis == "inner":
        assert mlp.dense is not None, "the axis belongs to a dense MLP"
        return mlp.dense.inner_size
    routed = mlp.routed
    assert routed is not None, "the axis belongs to a routed MLP"
    match axis:
        case "experts" | "expert":
            return routed.router.num_experts
        case "expert_inner":
            return routed.inner_size
        case "expert_inner_blocks":
            return routed.inner_size // BLOCK
        case "expert_gate_up" | "expert_pairs":
            return 2 * routed.inner_size
        case "shared":
            assert routed.shared is not None, "the axis belongs to a shared expert"
            return routed.shared.inner_size
