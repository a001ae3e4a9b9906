"""Weights quantized to 8 bits at load: e4m3 times a power of two per row. Half of bf16's bytes are read.

    QuantisedProjection   up to 64 rows: `skinny_gemm.py`, which widens codes in registers and scales its sums
                          more: PyTorch's GEMM with the dequantized weight

A power of two costs no precision (e4m3 is floating point), and makes dequantized weights exact in bf16, so
both paths compute with the same quantized model. Not a checkpoint format. Made by
`drafter/compute/gpu_triton/backend.py`.

Legend: N rows, K inputs, O outputs, P parts, L layers, R rows of a block of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .projections import OwnProjection, SwitchedProjection, TorchProjection, Use
from .skinny_gemm import ROW_TILES, ProductWorkspace

CODES = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A quantized weight.

    Attributes:
        codes_PLRK: e4m3, contiguous.
        scale_O: fp32, powers of two.
    """

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

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, K]."""
        codes_OK = self.codes_PLRK.flatten(0, 2).to(dtype)
        return codes_OK.mul_(self.scale_O[:, None])


class QuantisedProjection(SwitchedProjection):
    """A projection with quantized weights; with `one_tile` any number of rows uses `skinny_gemm.py`."""

    __slots__ = ("_one_tile",)

    def __init__(
        self,
        weight: QuantisedWeight,
        bias_O: Tensor | None,
        workspace: ProductWorkspace,
        *,
        one_tile: bool = False,
    ) -> None:
        codes, scale_O = weight.codes_PLRK, weight.scale_O
        own = OwnProjection(codes, bias_O, workspace, scale_O=scale_O, one_tile=one_tile)
        super().__init__(own, TorchProjection(_Dequantising(weight, bias_O)))
        self._one_tile = one_tile

    def _is_own(self, use: Use, num_rows: int) -> bool:
        return self._one_tile or num_rows <= ROW_TILES[-1]


class _Dequantising:
    """A `backend.Projection` that dequantizes the weight to x's dtype on each call."""

    __slots__ = ("_bias_O", "_weight")

    def __init__(self, weight: QuantisedWeight, bias_O: Tensor | None) -> None:
        self._weight, self._bias_O = weight, bias_O

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        y_NO = F.linear(x_NK, self._weight.dequantised(x_NK.dtype), self._bias_O)
        return y_NO if residual_NO is None else y_NO.add_(residual_NO)
