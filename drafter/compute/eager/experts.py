"""Experts in PyTorch's operators: what every other form of them means. Not fast, and it asks the host.

Legend: N rows, E experts of this rank, k chosen per row, M rows that chose an expert, H hidden, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..experts import ExpertActivation, ExpertWeights
from ..layers import Linear, gate, in_fp32

_STEEPNESS = 1.702  # of gpt-oss's sigmoid


class TorchExperts:
    """`experts.Experts`: expert by expert, each over the rows that chose it.

    Args:
        reads_1: counts those; see `backend.Backend.expert_reads`.
    """

    __slots__ = ("_activation", "_down_E", "_first", "_gate_up_E", "_limit", "_reads_1")

    def __init__(self, weights: ExpertWeights, reads_1: Tensor) -> None:
        self._reads_1 = reads_1
        self._activation: ExpertActivation = weights.activation
        self._limit, self._first = weights.limit, weights.first_expert
        gate_up_EIH, down_EHI = weights.unpacked()
        self._gate_up_E = products_of(gate_up_EIH, weights.gate_up_bias_EI)
        self._down_E = products_of(down_EHI, weights.down_bias_EH)

    def __call__(self, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        outputs_NkH = in_fp32(x_NH.new_zeros((*expert_ids_Nk.shape, x_NH.shape[1])))
        products_E = zip(self._gate_up_E, self._down_E, strict=True)
        for expert, (gate_up, down) in enumerate(products_E, self._first):
            rows_M, places_M = (expert_ids_Nk == expert).nonzero(as_tuple=True)
            if len(rows_M):
                inner_MI = expert_gate(gate_up(x_NH[rows_M]), self._activation, self._limit)
                outputs_NkH[rows_M, places_M] = in_fp32(down(inner_MI))
                self._reads_1 += 1
        return weighted_sum(outputs_NkH, weights_Nk).to(x_NH.dtype)


def products_of(weight_EOH: Tensor, bias_EO: Tensor | None) -> list[Linear]:
    """A product for each expert."""
    biases = [None] * len(weight_EOH) if bias_EO is None else bias_EO.unbind()
    return [Linear(weight_OH, bias_O) for weight_OH, bias_O in zip(weight_EOH, biases, strict=True)]


def expert_gate(gate_up_MI: Tensor, activation: ExpertActivation, limit: float | None) -> Tensor:
    """An expert's inner product of [gate, up], [M, I]; see `experts.ExpertActivation`."""
    if activation != "swiglu_clamped":
        return gate(gate_up_MI, activation)
    assert limit is not None, "a clamp has a limit"
    gate_MI, up_MI = in_fp32(gate_up_MI).chunk(2, dim=-1)
    gate_MI, up_MI = gate_MI.clamp(max=limit), up_MI.clamp(-limit, limit)
    return ((up_MI + 1.0) * gate_MI * torch.sigmoid(_STEEPNESS * gate_MI)).to(gate_up_MI.dtype)


def weighted_sum(outputs_NkH: Tensor, weights_Nk: Tensor) -> Tensor:
    """A row's outputs times their weights, added one after the other in the order of k: fp32 [N, H]."""
    total_NH = outputs_NkH[:, 0] * weights_Nk[:, :1]
    for place in range(1, outputs_NkH.shape[1]):
        total_NH = total_NH + outputs_NkH[:, place] * weights_Nk[:, place : place + 1]
    return total_NH
