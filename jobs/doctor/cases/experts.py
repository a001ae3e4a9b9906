"""Routed experts with our own kernels: plain and packed weights, in tiles of every height.

Sizes are those of supported models on a GPU, and small ones in Triton's interpreter.

Legend: N rows, k experts chosen per row, E experts, H hidden, I inner size, O outputs of a product, J codes
of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....drafter.compute.checkpoint.packed_4bit import BLOCK, MXFP4, Int4, Packed
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.layers.moe import ExpertActivation, ExpertWeights
from .case import Case, checks_of_served
from .checks import Check, off_by
from .subject import KernelInputs, MachineKind

_HALF, _FP32 = 8, 256  # bounds in units of the last place
_LIMIT = 1.0  # of the clamp; many values exceed it
# Numbers of rows for tiles of 16, 32, 64 and 128 (row, expert) pairs, by experts per row.
_GPU_ROWS = {8: (1, 16, 190, 400, 700), 4: (1, 16, 120, 200, 400)}
_SMALL_ROWS = (5, 20, 40, 70)


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The experts of a model; `places` experts per row; plain weights if `packed` is None."""

    name: str
    hidden: int
    inner: int
    experts: int
    places: int
    activation: ExpertActivation
    packed: type[Packed] | None = None

    def rows(self, place: MachineKind) -> tuple[int, ...]:
        """Return numbers of rows that use tiles of every height."""
        return _GPU_ROWS[self.places] if place.device.type == "cuda" else _SMALL_ROWS


QWEN3_30B = ExpertKind("plain, SiLU", 2048, 768, 128, 8, "silu")
GEMMA4_26B = ExpertKind("plain, GELU", 2816, 704, 128, 8, "gelu_tanh")
GPT_OSS_20B = ExpertKind("MXFP4, clamped", 2880, 2880, 32, 4, "swiglu_clamped", MXFP4)
KIMI_K2 = ExpertKind("INT4, SiLU", 7168, 2048, 48, 8, "silu", Int4)  # the share of one of eight GPUs
_SMALL = {"hidden": 192, "inner": 64, "experts": 4, "places": 2}


def expert_kinds(place: MachineKind) -> list[ExpertKind]:
    kinds = [QWEN3_30B, GEMMA4_26B, GPT_OSS_20B, KIMI_K2]
    return kinds if place.device.type == "cuda" else [replace(kind, **_SMALL) for kind in kinds]


def bytes_of(weight: Tensor | Packed) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.blocks_EOBJ.nbytes + weight.scales_EOB.nbytes


def expert_checks(place: MachineKind, *, quick: bool) -> Iterator[Check]:
    cases = [
        Case(kind.name, partial(_error, kind=kind, quick=quick), _HALF, _FP32) for kind in expert_kinds(place)
    ]
    yield from checks_of_served("own experts", place, cases, quick=quick)


def _error(inputs: KernelInputs, kind: ExpertKind, quick: bool) -> float:
    rows, weights = kind.rows(inputs.place), random_experts(inputs, kind)
    experts, errors = inputs.backend.experts(weights), []
    for num_rows in rows[:: len(rows) - 1] if quick else rows:
        routed = random_rows(inputs, kind, num_rows)
        errors.append(off_by(experts(*routed), exact_experts(weights, *routed)))
    return max(errors)


def random_experts(inputs: KernelInputs, kind: ExpertKind) -> ExpertWeights:
    experts, hidden, inner = kind.experts, kind.hidden, kind.inner
    make = {None: _plain, MXFP4: _mxfp4, Int4: _int4}[kind.packed]
    return ExpertWeights(
        gate_up=make(inputs, experts, 2 * inner, hidden),
        down=make(inputs, experts, hidden, inner),
        gate_up_bias_EI=inputs.randn(experts, 2 * inner) if kind.packed is MXFP4 else None,
        down_bias_EH=inputs.randn(experts, hidden) if kind.packed is MXFP4 else None,
        activation=kind.activation,
        limit=_LIMIT if kind.activation == "swiglu_clamped" else None,
    )


def random_rows(inputs: KernelInputs, kind: ExpertKind, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows x, their expert ids (uniformly routed) and routing weights."""
    scores_NE = inputs.randn(num_rows, kind.experts).float()
    weights_Nk, ids_Nk = scores_NE.softmax(-1).topk(kind.places)
    x_NH = inputs.randn(num_rows, kind.hidden)
    return x_NH, ids_Nk.to(torch.int32), weights_Nk / weights_Nk.sum(-1, keepdim=True)


def _plain(inputs: KernelInputs, experts: int, num_out: int, num_in: int) -> Tensor:
    return inputs.weight(experts * num_out, num_in).unflatten(0, (experts, num_out))


def _mxfp4(inputs: KernelInputs, experts: int, num_out: int, num_in: int) -> MXFP4:
    """Make random codes with scales that keep a product's magnitude; the root mean square of codes is 2.9."""
    shape, device = (experts, num_out, num_in // BLOCK), inputs.place.device
    random = torch.Generator(device).manual_seed(0)
    middle = 127 - round(torch.log2(torch.tensor(2.9 * num_in**0.5)).item())
    scales = torch.randint(middle - 1, middle + 2, shape, dtype=torch.uint8, device=device, generator=random)
    return MXFP4(_codes(shape, random), scales)


def _int4(inputs: KernelInputs, experts: int, num_out: int, num_in: int) -> Int4:
    """Make random codes with scales that keep a product's magnitude; the root mean square of codes is 4.6."""
    shape, device = (experts, num_out, num_in // BLOCK), inputs.place.device
    random = torch.Generator(device).manual_seed(0)
    sizes = torch.rand(shape, device=device, generator=random) + 0.5
    return Int4(_codes(shape, random), (sizes / (4.6 * num_in**0.5)).to(inputs.dtype))


def _codes(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    shape = (*shape, BLOCK // 2)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=random.device, generator=random)


def exact_experts(weights: ExpertWeights, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Return the definition's result in fp64, by expert: all of them unpacked may not fit into memory."""
    y_NH = torch.zeros_like(x_NH, dtype=torch.float64)
    for expert in range(weights.gate_up.shape[0]):
        experts = EagerBackend().experts(_single_expert(weights, expert))
        y_NH += experts(x_NH.double(), expert_ids_Nk, weights_Nk.double())
    return y_NH


def _single_expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    at = slice(expert, expert + 1)

    def cut(weight: Tensor | Packed) -> Tensor:
        if isinstance(weight, Packed):
            packed = type(weight)(weight.blocks_EOBJ[at], weight.scales_EOB[at])
            return packed.dequantised(torch.float32).double()  # exact in fp32
        return weight[at].double()

    gate_up_bias_EI, down_bias_EH = weights.gate_up_bias_EI, weights.down_bias_EH
    return replace(
        weights,
        gate_up=cut(weights.gate_up),
        down=cut(weights.down),
        gate_up_bias_EI=None if gate_up_bias_EI is None else cut(gate_up_bias_EI),
        down_bias_EH=None if down_bias_EH is None else cut(down_bias_EH),
        first_expert=weights.first_expert + expert,
    )
