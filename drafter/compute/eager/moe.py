"""Routed experts in PyTorch: the definition, also used on CPUs.

(row, expert) pairs are sorted by expert, so that a pass reads each chosen expert's weights once; then a row's
results are added in the order of its choice. In fp32 on a CPU a row's bits do not depend on how many rows its
expert has (`layers.Linear`).

Legend: N rows, k experts chosen per row, P = N * k pairs, M pairs of one expert, E experts of this rank, H
hidden, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..block_weights import Projection
from ..checkpoint.packed_codes import PackedCodes
from ..checkpoint.quantized_matrix import Matrix
from ..layers.linear import Activation, gate, in_fp32
from ..layers.moe import ExpertActivation, ExpertWeights, matrices

_STEEPNESS = 1.702  # alpha of gpt-oss's swiglu


class EagerExperts:
    """The routed experts of a layer, on any device; synchronizes with the host to learn the chosen experts.

    Args:
        reads_1: counts the experts that were read; see `backend.Backend.expert_reads`.
        linear: makes an expert's product, with codes where the weights are codes.
        gate: activation(gate) * up of a product [M, 2 I].
    """

    __slots__ = ("_activation", "_down_E", "_first", "_gate", "_gate_up_E", "_limit", "_reads_1")

    def __init__(
        self,
        weights: ExpertWeights,
        reads_1: Tensor,
        linear: Callable[[Matrix, Tensor | None], Projection],
        gate: Callable[[Tensor, Activation], Tensor] = gate,
    ) -> None:
        self._reads_1, self._gate = reads_1, gate
        self._activation: ExpertActivation = weights.activation
        self._limit, self._first = weights.limit, weights.first_expert
        self._gate_up_E = _products(weights.gate_up, weights.gate_up_bias_EI, linear)
        self._down_E = _products(weights.down, weights.down_bias_EH, linear)

    def __call__(self, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        ids_P, num_chosen = expert_ids_Nk.flatten() - self._first, expert_ids_Nk.shape[1]
        ids_P, order_P = ids_P.sort(stable=True)
        bounds_E1 = torch.arange(len(self._down_E) + 1, device=ids_P.device, dtype=ids_P.dtype)
        begins_E1 = torch.searchsorted(ids_P, bounds_E1).tolist()
        outputs_PH = in_fp32(x_NH.new_zeros((len(ids_P), x_NH.shape[1])))  # stays 0 for other ranks' experts
        chosen = [e for e in range(len(self._down_E)) if begins_E1[e] < begins_E1[e + 1]]
        for expert in chosen:
            pairs_M = order_P[begins_E1[expert] : begins_E1[expert + 1]]
            inner_MI = self._inner(self._gate_up_E[expert](x_NH[pairs_M // num_chosen]))
            outputs_PH[pairs_M] = in_fp32(self._down_E[expert](inner_MI))
        self._reads_1 += len(chosen)
        return _weighted_sum(outputs_PH.view(*expert_ids_Nk.shape, -1), weights_Nk).to(x_NH.dtype)

    def _inner(self, gate_up_MI: Tensor) -> Tensor:
        """Return an expert's inner state from its product [gate, up]; see `moe.ExpertActivation`."""
        if self._activation != "swiglu_clamped":
            return self._gate(gate_up_MI, self._activation)
        assert self._limit is not None, "a clamp has a limit"
        gate_MI, up_MI = in_fp32(gate_up_MI).chunk(2, dim=-1)
        gate_MI, up_MI = gate_MI.clamp(max=self._limit), up_MI.clamp(-self._limit, self._limit)
        return ((up_MI + 1.0) * gate_MI * torch.sigmoid(_STEEPNESS * gate_MI)).to(gate_up_MI.dtype)


def _products(
    weight_EOH: Tensor | PackedCodes,
    bias_EO: Tensor | None,
    linear: Callable[[Matrix, Tensor | None], Projection],
) -> list[Projection]:
    biases = [None] * weight_EOH.shape[0] if bias_EO is None else bias_EO.unbind()
    return [linear(weight, bias_O) for weight, bias_O in zip(matrices(weight_EOH), biases, strict=True)]


def _weighted_sum(outputs_NkH: Tensor, weights_Nk: Tensor) -> Tensor:
    """Add a row's outputs times their weights in the order of k: fp32 [N, H]."""
    total_NH = outputs_NkH[:, 0] * weights_Nk[:, :1]
    for place in range(1, outputs_NkH.shape[1]):
        total_NH = total_NH + outputs_NkH[:, place] * weights_Nk[:, place : place + 1]
    return total_NH
