"""Routed feed-forwards: a few of many small gated MLPs for each row. What they are, not how they compute.

    Router         the rule: which experts a row goes to, and how much of each; as RopeConfig is rotation's
    RouterWeights  the rule and its tensors; computed by `compute/eager/moe_routing.py`, alike on every rank
    ExpertWeights  one rank's experts of one layer, as a backend gets them, once, at load
    Experts        what `Backend.experts` makes of them: y = sum of w_j expert_j(x) in the order of choice

Read from config.json by the target's families; made by its decoder; called by
`drafter/compute/blocks/mlp.py`.

Legend: N rows, E experts, k chosen per row, H hidden, I inner size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..quantization.packed_4bit import Packed
from .linear import RMSNorm

# Of experts alone: `swiglu_clamped` is (v + 1) g sigmoid(1.702 g), v = clamp(up, -limit, limit) and
# g = min(gate, limit).
ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRouter:
    """Which experts a row goes to, and how much of each.

    Attributes:
        score: of the logits, in fp32.
        choose_first: the choice is by logits, and the score is over the chosen alone (gpt-oss).
        renormalize: the chosen weights are divided by their sum (sigmoid: + 1e-20).
        bias: of the product that makes logits.
        correction: a bias per expert that is added to the score for the choice, not for the weight.
        groups, top_groups: experts stand in groups, and only these many groups' are chosen from; a group
            scores the sum of its two best.
        scale: of the weights.
        normed_input: logits are of rms(x) * w of the raw residual, not of what the experts get (Gemma 4).
        expert_scale: weights are multiplied by a factor per expert, last.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    choose_first: bool = False
    renormalize: bool = True
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    normed_input: bool = False
    expert_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """A router's tensors, whole on every rank.

    Attributes:
        weight_EH: of the logits; rows are cast to its dtype, so that a router in fp32 stays in fp32.
        bias_E: as the weight.
        correction_E, expert_scale_E: fp32.
        norm: of the raw residual, where the rule says `normed_input`.
    """

    rule: MoeRouter
    weight_EH: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None
    expert_scale_E: Tensor | None = None
    norm: RMSNorm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One layer's experts on one rank: E whole ones, or a slice of the inner size of all.

    Attributes:
        gate_up: [E, 2 I, H], gate rows, then up rows; it and `down` may be packed.
        down: [E, H, I].
        gate_up_bias_EI: [E, 2 I] in the order of `gate_up`.
        down_bias_EH: inside the weighted sum; zero but on one rank where the inner size is split.
        limit: of `swiglu_clamped`.
        first_expert: the model's number of this rank's first; rows that chose others get nothing for them.
    """

    gate_up: Tensor | Packed
    down: Tensor | Packed
    gate_up_bias_EI: Tensor | None = None
    down_bias_EH: Tensor | None = None
    activation: ExpertActivation = "silu"
    limit: float | None = None
    first_expert: int = 0

    @property
    def device(self) -> torch.device:
        return self.down.device

    def dequantised(self, dtype: torch.dtype) -> ExpertWeights:
        """The same with no weight packed: for backends whose products take none."""
        return replace(self, gate_up=_plain(self.gate_up, dtype), down=_plain(self.down, dtype))

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """`gate_up` and `down`, for whoever is never given packed ones."""
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor), "they come dequantised"
        return self.gate_up, self.down


def _plain(weight: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised(dtype)


class Route(Protocol):
    """A router, ready to run."""

    def __call__(self, normed_NH: Tensor, residual_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts, int32 [N, k], the best first, and how much of each, fp32 [N, k].

        Args:
            normed_NH: what the experts get.
            residual_NH: what it is the norm of.
        """
        ...


class Experts(Protocol):
    """One rank's experts of one layer, laid out."""

    def __call__(self, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """y [N, H] in the dtype of `x`: a row's k contributions, those of this rank, added in fp32 in the
        order of k, so that its bits do not depend on other rows.

        Args:
            expert_ids_Nk: int32, in the model's numbers.
            weights_Nk: fp32.
        """
        ...
