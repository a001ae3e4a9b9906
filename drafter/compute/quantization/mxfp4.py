"""MXFP4: 4-bit weights in blocks of 32 that share a power of two (OCP MX specification v1.0).

The format of gpt-oss's published experts: 4.25 bits per weight. A value is an element of `GRID` (E2M1) times
2^(scale - 127) of its block. `drafter/compute/layers/moe.py` multiplies with the dequantized tensor, backends
with packed GEMMs read the bytes.

    byte j of a block    | element 2j + 1 | element 2j |      high nibble, low nibble

Legend: E experts, O outputs, I inputs, B = I / 32 blocks of a row, J = 16 bytes of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed_4bit import Packed

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = _POSITIVE + tuple(-value for value in _POSITIVE)  # by code
_BIAS = 127  # of a scale's exponent


class MXFP4(Packed):
    """MXFP4 weights; scales are uint8, biased exponents; 255 is NaN.

    Dequantized weights are exact in bf16, and in fp16 if the exponent fits.
    """

    __slots__ = ()

    @staticmethod
    def _is_scale(dtype: torch.dtype) -> bool:
        return dtype is torch.uint8

    @staticmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        grid = torch.tensor(GRID, device=codes_OBJ2.device)
        exponents_OB11 = (scales_OB.int() - _BIAS)[..., None, None]
        return torch.ldexp(grid[codes_OBJ2.int()], exponents_OB11)
