"""Routed experts with our own kernels: plain and packed weights, in tiles of every height.

Sizes are those of supported models on a GPU, and small ones in Triton's interpreter.

Legend: N rows, k experts chosen per row, E experts, H hidden, I inner size, O outputs of a product, J codes
of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ....drafter.compute.checkpoint.packed_codes import BLOCK, PackedCodes
from ....drafter.compute.checkpoint.quantized_matrix import Code
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.layers.moe import ExpertActivation, ExpertWeights
from .checks import Case, Check, checks_of_served, off_by
from .subject import KernelInputs, MachineKind

# Kind of codes, inputs per scale, and root mean square of codes.
_FORMS: Mapping[str, tuple[Code, int, float]] = {
    "mxfp4": ("e2m1", BLOCK, 2.9),
    "int4": ("int4", BLOCK, 4.6),
    "e4m3": ("e4m3", 128, 69.0),
    "nvfp4": ("e2m1", 16, 2.9),
}
_HALF, _FP32 = 8, 256  # bounds in units of the last place
_LIMIT = 1.0  # of the clamp; many values exceed it
# Numbers of rows for tiles of 16, 32, 64 and 128 (row, expert) pairs, by experts per row.
_GPU_ROWS = {8: (1, 16, 190, 400, 700), 4: (1, 16, 120, 200, 400)}
_SMALL_ROWS = (5, 20, 40, 70)


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The experts of a model; `places` experts per row; plain weights if `codes` is None."""

    name: str
    hidden: int
    inner: int
    experts: int
    places: int
    activation: ExpertActivation
    codes: Literal["mxfp4", "int4", "e4m3", "nvfp4"] | None = None

    def rows(self, machine: MachineKind) -> tuple[int, ...]:
        """Return numbers of rows that use tiles of every height."""
        return _GPU_ROWS[self.places] if machine.device.type == "cuda" else _SMALL_ROWS


QWEN3_30B = ExpertKind("plain, SiLU", 2048, 768, 128, 8, "silu")
GEMMA4_26B = ExpertKind("plain, GELU", 2816, 704, 128, 8, "gelu_tanh")
GPT_OSS_20B = ExpertKind("MXFP4, clamped", 2880, 2880, 32, 4, "swiglu_clamped", "mxfp4")
KIMI_K2 = ExpertKind("INT4, SiLU", 7168, 2048, 48, 8, "silu", "int4")  # the share of one of eight GPUs
DEEPSEEK_V3 = ExpertKind("FP8 in blocks, SiLU", 7168, 2048, 32, 8, "silu", "e4m3")  # likewise
NVFP4_30B = replace(QWEN3_30B, name="NVFP4, SiLU", codes="nvfp4")
_SMALL = {"hidden": 256, "inner": 128, "experts": 4, "places": 2}


def expert_kinds(machine: MachineKind) -> list[ExpertKind]:
    kinds = [QWEN3_30B, GEMMA4_26B, GPT_OSS_20B, KIMI_K2, DEEPSEEK_V3, NVFP4_30B]
    return kinds if machine.device.type == "cuda" else [replace(kind, **_SMALL) for kind in kinds]


def bytes_of(weight: Tensor | PackedCodes) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def expert_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    cases = [
        Case(kind.name, partial(_error, kind=kind, quick=quick), _HALF, _FP32)
        for kind in expert_kinds(machine)
    ]
    yield from checks_of_served("own experts", machine, cases, quick=quick)


def _error(inputs: KernelInputs, kind: ExpertKind, quick: bool) -> float:
    rows, weights = kind.rows(inputs.machine), random_experts(inputs, kind)
    experts, errors = inputs.backend.experts(weights), []
    for num_rows in rows[:: len(rows) - 1] if quick else rows:
        routed = random_rows(inputs, kind, num_rows)
        errors.append(off_by(experts(*routed), exact_experts(weights, *routed)))
    return max(errors)


def random_experts(inputs: KernelInputs, kind: ExpertKind) -> ExpertWeights:
    experts, hidden, inner = kind.experts, kind.hidden, kind.inner
    has_bias = kind.codes == "mxfp4"
    return ExpertWeights(
        gate_up=_weight(inputs, kind, experts, 2 * inner, hidden),
        down=_weight(inputs, kind, experts, hidden, inner),
        gate_up_bias_EI=inputs.randn(experts, 2 * inner) if has_bias else None,
        down_bias_EH=inputs.randn(experts, hidden) if has_bias else None,
        activation=kind.activation,
        limit=_LIMIT if kind.activation == "swiglu_clamped" else None,
    )


def random_rows(inputs: KernelInputs, kind: ExpertKind, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows x, their expert ids (uniformly routed) and routing weights."""
    scores_NE = inputs.randn(num_rows, kind.experts).float()
    weights_Nk, ids_Nk = scores_NE.softmax(-1).topk(kind.places)
    x_NH = inputs.randn(num_rows, kind.hidden)
    return x_NH, ids_Nk.to(torch.int32), weights_Nk / weights_Nk.sum(-1, keepdim=True)


def _weight(
    inputs: KernelInputs, kind: ExpertKind, experts: int, num_out: int, num_in: int
) -> Tensor | PackedCodes:
    """Make random weights that keep a product's magnitude; codes have their root mean square."""
    if kind.codes is None:
        return inputs.weight(experts * num_out, num_in).unflatten(0, (experts, num_out))
    device = inputs.machine.device
    random = torch.Generator(device).manual_seed(0)
    code, group, deviation = _FORMS[kind.codes]
    width = num_in if code == "e4m3" else num_in // 2
    made = {"device": device, "generator": random}
    codes = torch.randint(0, 256, (experts, num_out, width), dtype=torch.uint8, **made)
    if code == "e4m3":
        codes &= 0xF7  # neither NaN nor the largest numbers
    shape, size = (experts, num_out, num_in // group), 1 / (deviation * num_in**0.5)
    if kind.codes == "mxfp4":
        middle = 127 + round(torch.log2(torch.tensor(size)).item())
        exponents = torch.randint(middle - 1, middle + 2, shape, **made)
        return PackedCodes(code, codes, exponents.to(torch.uint8))
    sizes = (torch.rand(shape, **made) + 0.5) * size
    return PackedCodes(code, codes, sizes.to(inputs.dtype) if code == "int4" else sizes)


def exact_experts(weights: ExpertWeights, x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Return the definition's result in fp64, by expert: all of them unpacked may not fit into memory."""
    y_NH = torch.zeros_like(x_NH, dtype=torch.float64)
    for expert in range(weights.gate_up.shape[0]):
        experts = EagerBackend().experts(_single_expert(weights, expert))
        y_NH += experts(x_NH.double(), expert_ids_Nk, weights_Nk.double())
    return y_NH


def _single_expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    at = slice(expert, expert + 1)

    def cut(weight: Tensor | PackedCodes) -> Tensor:
        if isinstance(weight, PackedCodes):
            return weight.matrix(expert).dequantized(torch.float32).double()[None]  # rounded once, to fp32
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
