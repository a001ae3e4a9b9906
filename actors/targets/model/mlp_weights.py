"""Reads a rank's tensors of a layer's MLP, dense, routed or both, from the parts that `weights.py` provides.

In any of the checkpoint's forms (`mlp_spec.EXPERT_FORMS`), experts become [E, 2 I, H] and [E, H, I], with
this rank's experts or its part of each one's inner states.

Legend: H hidden, I inner size of a rank, E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....drafter.compute.checkpoint.packed_codes import PackedCodes, stack
from ....drafter.compute.checkpoint.quantized_matrix import Matrix, cat_rows
from ....drafter.compute.layers.linear import RMSNorm
from ....drafter.compute.layers.moe import ExpertWeights, RouterWeights
from .mlp_spec import FUSED_EXPERTS, PACKED_EXPERTS, RoutedMLP


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """A dense MLP's tensors: gate rows before up rows. The bias of down is zero except on rank 0."""

    gate_up_IH: Matrix
    gate_up_bias_I: Tensor | None
    down_HI: Matrix
    down_bias_H: Tensor | None


@dataclass(frozen=True, slots=True)
class RoutedTensors:
    """A routed MLP's tensors. `shared_weight_1H` makes the shared expert's weight; None for a weight of 1."""

    router: RouterWeights
    experts: ExpertWeights
    shared: DenseTensors | None
    shared_weight_1H: Tensor | None


@dataclass(frozen=True, slots=True)
class ParallelMlpTensors:
    """Tensors of `ParallelMlpSpec`. `routed_norm_H` precedes the experts; the others follow their MLP."""

    dense: DenseTensors
    dense_out_norm_H: Tensor
    routed: RoutedTensors
    routed_norm_H: Tensor
    routed_out_norm_H: Tensor


MlpTensors = DenseTensors | RoutedTensors | ParallelMlpTensors


class LayerParts(Protocol):
    """The tensors of one layer by their key in `ModelSpec.tensors`: a rank's slices, on its device."""

    @property
    def dtype(self) -> torch.dtype: ...

    def required(self, part: str) -> Tensor: ...

    def matrix(self, part: str) -> Matrix:
        """Return a matrix, as codes where they are kept."""
        ...

    def optional(self, part: str) -> Tensor | None:
        """Return a tensor, of zeros if only rank 0 has it; None if the layer has none."""
        ...

    def joined(self, *parts: str) -> Tensor | None: ...

    def of_each_expert(self, part: str, *, as_codes: bool) -> Iterator[Matrix]:
        """Yield this rank's matrix of each expert; `as_codes` as `matrix`, else as numbers."""
        ...


def read_dense(parts: LayerParts, prefix: str = "") -> DenseTensors:
    """Read a dense MLP; names of its parts begin with `prefix` ("" or "shared_")."""
    gate, up, down = (f"{prefix}{name}" for name in ("gate", "up", "down"))
    return DenseTensors(
        gate_up_IH=cat_rows([parts.matrix(gate), parts.matrix(up)], parts.dtype),
        gate_up_bias_I=parts.joined(f"{gate}_bias", f"{up}_bias"),
        down_HI=parts.matrix(down),
        down_bias_H=parts.optional(f"{down}_bias"),
    )


def read_routed(
    parts: LayerParts,
    mlp: RoutedMLP,
    form: tuple[str, ...],
    experts: slice,
    *,
    adds_down_bias: bool,
    eps: float,
) -> RoutedTensors:
    """Read a routed MLP stored in a `form` of `EXPERT_FORMS`: this rank's `experts`, or its part of each.

    Without `adds_down_bias` another rank adds the biases of down, this one zeros. `eps` is of the router's.
    """
    norm_H = parts.optional("router_norm")
    router = RouterWeights(
        rule=mlp.router,
        weight_EH=parts.required("router"),
        bias_E=parts.optional("router_bias"),
        correction_E=parts.optional("router_correction"),
        expert_scale_E=parts.optional("expert_scale"),
        norm=None if norm_H is None else RMSNorm(norm_H, eps),
    )
    num_held = experts.stop - experts.start
    gate_up, down = _read_experts(parts, form, num_held)
    down_bias_EH = parts.optional("experts_down_bias")
    if down_bias_EH is not None and not adds_down_bias:
        down_bias_EH = torch.zeros_like(down_bias_EH)
    weights = ExpertWeights(
        gate_up=gate_up,
        down=down,
        gate_up_bias_EI=parts.optional("experts_gate_up_bias"),
        down_bias_EH=down_bias_EH,
        activation=mlp.activation,
        limit=mlp.limit,
        first_expert=experts.start,
        num_ranks=mlp.router.num_experts // num_held,
    )
    shared = None if mlp.shared is None else read_dense(parts, "shared_")
    return RoutedTensors(router, weights, shared, parts.optional("shared_weight"))


def _read_experts(
    parts: LayerParts, form: tuple[str, ...], count: int
) -> tuple[Tensor | PackedCodes, Tensor | PackedCodes]:
    """Return gate_up [E, 2 I, H] and down [E, H, I]."""
    if form == FUSED_EXPERTS:
        return parts.required("experts_gate_up"), parts.required("experts_down")
    if form == PACKED_EXPERTS:
        gate_up_blocks, gate_up_scales, down_blocks, down_scales = (parts.required(part) for part in form)
        return PackedCodes.mxfp4(gate_up_blocks, gate_up_scales), PackedCodes.mxfp4(down_blocks, down_scales)
    *gate_up, down = form
    return _stack_experts(parts, gate_up, count), _stack_experts(parts, [down], count)


def _stack_experts(parts: LayerParts, names: Sequence[str], count: int) -> Tensor | PackedCodes:
    """Return all experts' matrices with the rows of `names`: as codes if all have one form."""
    for as_codes in (True, False):
        rows = (parts.of_each_expert(name, as_codes=as_codes) for name in names)
        matrices = (cat_rows(each, parts.dtype) for each in zip(*rows, strict=True))
        if (held := stack(matrices, count)) is not None:
            return held
    raise AssertionError("numbers have one form")
