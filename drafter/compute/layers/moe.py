"""Routed experts (MoE): a few of many small gated MLPs for each row. Definitions, independent of a backend.

    MoeRouter      the rule: which experts a row goes to, with which weights
    RouterWeights  the rule and its tensors; computed by `compute/eager/moe_routing.py`, equally on all ranks
    ExpertWeights  one rank's experts of one layer, as a backend gets them, at load
    Experts        what `Backend.experts` makes of them: y = sum of w_j expert_j(x) in the order of choice

Legend: N rows, E experts, k chosen per row, H hidden, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..checkpoint.packed_codes import PackedCodes, stack
from ..checkpoint.quantized_matrix import GROUP, Matrix, quantize
from .linear import RMSNorm

# Only experts have `swiglu_clamped` (gpt-oss): (v + 1) g sigmoid(1.702 g), v = clamp(up, -limit, limit), g =
# min(gate, limit).
ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRouter:
    """Which experts a row goes to, and their weights.

    Attributes:
        score: function of the logits, in fp32.
        choose_first: choose by logits, then score only the chosen (gpt-oss).
        renormalize: divide the chosen weights by their sum (sigmoid: + 1e-20).
        bias: whether the projection to logits has one.
        correction: a bias per expert, added to the score for the choice, not for the weight.
        groups, top_groups: experts are divided into groups, and chosen only from the best `top_groups`; a
            group's score is the sum of its two best.
        scale: factor on the weights.
        normed_input: logits are of rms(x) * w of the raw residual, not of the experts' input (Gemma 4).
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
    """A router's tensors, complete on every rank.

    Rows are cast to the dtype of `weight_EH`, so an fp32 router computes in fp32; corrections and scales are
    fp32. `norm` is that of the raw residual, if the rule has `normed_input`.
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
        gate_up: [E, 2 I, H], gate rows, then up rows; it and `down` may be codes.
        down: [E, H, I].
        gate_up_bias_EI: [E, 2 I] in the order of `gate_up`.
        down_bias_EH: part of the weighted sum; zero on all but one rank if the inner size is split.
        limit: of `swiglu_clamped`.
        first_expert: id in the model of this rank's first; other ranks' experts contribute 0.
        num_ranks: ranks that have E whole experts each; 1 if all are here, or parts of all.
    """

    gate_up: Tensor | PackedCodes
    down: Tensor | PackedCodes
    gate_up_bias_EI: Tensor | None = None
    down_bias_EH: Tensor | None = None
    activation: ExpertActivation = "silu"
    limit: float | None = None
    first_expert: int = 0
    num_ranks: int = 1

    @property
    def device(self) -> torch.device:
        return self.down.device

    def dequantized(self, dtype: torch.dtype) -> ExpertWeights:
        """Return a copy with dequantized weights, for backends that take no codes."""
        return self._map(lambda weight: weight if isinstance(weight, Tensor) else weight.dequantized(dtype))

    def quantized(self, code: Literal["int8", "int4", "uint4"]) -> ExpertWeights:
        """Return a copy with weights that are plain, and have whole groups of inputs, as integers."""

        def of_kind(weight: Tensor | PackedCodes) -> Tensor | PackedCodes:
            if not isinstance(weight, Tensor) or weight.shape[2] % GROUP:
                return weight
            codes = stack((quantize(weight_OI, code) for weight_OI in weight), len(weight))
            assert codes is not None, "all are quantized alike"
            return codes

        return self._map(of_kind)

    def _map(self, change: Callable[[Tensor | PackedCodes], Tensor | PackedCodes]) -> ExpertWeights:
        return replace(self, gate_up=change(self.gate_up), down=change(self.down))


def matrices(weight_EOI: Tensor | PackedCodes) -> Iterator[Matrix]:
    """Yield each expert's matrix [O, I]."""
    if isinstance(weight_EOI, Tensor):
        yield from weight_EOI
    else:
        yield from (weight_EOI.matrix(expert) for expert in range(weight_EOI.shape[0]))


class Route(Protocol):
    """A router, ready to run."""

    def __call__(
        self, normed_NH: Tensor, residual_NH: Tensor, owners_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return experts, int32 [N, k], best first, and weights, fp32 [N, k]; takes norm and residual.

        Rows with a negative owner are padding: their experts are -1, which no rank has.
        """
        ...


class Experts(Protocol):
    def __call__(self, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return y [N, H] in the dtype of `x`: the sum of a row's contributions from this rank's experts.

        They are added in fp32 in the order of k, so that a row's bits do not depend on other rows. Ids
        (int32) are the model's.
        """
        ...
