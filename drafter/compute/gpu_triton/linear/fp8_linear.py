"""Weights quantized to 8 bits at load: e4m3 times a power of two per row. Half of bf16's bytes are read.

    up to 256 rows   `skinny_gemm.py`, which widens codes in registers and scales its sums, if it is faster
    more             PyTorch's GEMM with the weight that `packed_codes.py` dequantizes

A power of two costs no precision (e4m3 is floating point), and makes dequantized weights exact in bf16, so
both paths compute with the same quantized model. Not a checkpoint format. Made by
`drafter/compute/gpu_triton/backend.py`.

Legend: N rows, K inputs, O outputs, P parts, L layers, R rows of a block of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.packed_codes import PackedCodes
from .gemm_tiles import ProductWorkspace
from .projections import GemmChoice, LayerProjection, OwnProjection, own_or_dequantized

CODES = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A quantized weight: contiguous e4m3 codes, and fp32 scales that are powers of two."""

    codes_PLRK: Tensor
    scale_O: Tensor

    @classmethod
    def of(cls, weight_PLRK: Tensor) -> QuantisedWeight:
        """Quantize to nearest. The scale puts a row's largest magnitude in the upper half of e4m3's range."""
        weight_PLRK = weight_PLRK.float()
        mantissa_PLR1, exponent_PLR1 = torch.frexp(
            weight_PLRK.abs().amax(-1, keepdim=True) / torch.finfo(CODES).max
        )
        exponent_PLR1 = torch.where(mantissa_PLR1 == 0.5, exponent_PLR1 - 1, exponent_PLR1)
        scale_PLR1 = torch.ldexp(torch.ones_like(mantissa_PLR1), exponent_PLR1)
        return cls((weight_PLRK / scale_PLR1).to(CODES).contiguous(), scale_PLR1.flatten())

    def packed(self) -> PackedCodes:
        """Return the same memory as codes [O, K] of which a row is one group."""
        codes_OK = self.codes_PLRK.flatten(0, 2)
        return PackedCodes("e4m3", codes_OK, self.scale_O[:, None])


def quantised_projection(
    weight: QuantisedWeight,
    bias_O: Tensor | None,
    workspace: ProductWorkspace,
    choice: GemmChoice,
    *,
    one_tile: bool = False,
) -> LayerProjection:
    """Return a projection with quantized weights; with `one_tile` always `skinny_gemm.py`."""
    codes, scale_O = weight.codes_PLRK, weight.scale_O
    own = OwnProjection(codes, bias_O, workspace, scale_O=scale_O, one_tile=one_tile)
    return own if one_tile else own_or_dequantized(own, weight.packed(), bias_O, choice)
