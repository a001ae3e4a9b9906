"""MXFP4: weights of four bits, in blocks of 32 that share a power of two (OCP Microscaling Formats, v1.0).

How gpt-oss's experts are published: 4.25 bits a weight. A value is a point of `GRID` (E2M1) times 2^(scale -
127) of its block. Not a product: `drafter/compute/layers/moe.py` multiplies with the dequantised tensor, a
backend with packed products reads the bytes as they lie here.

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
    """Scales are uint8, biased exponents; 255 stands for no number. Weights are exact in bf16, too, and in
    fp16 where their exponent fits."""

    __slots__ = ()

    @staticmethod
    def _is_scale(dtype: torch.dtype) -> bool:
        return dtype is torch.uint8

    @staticmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        grid = torch.tensor(GRID, device=codes_OBJ2.device)
        exponents_OB11 = (scales_OB.int() - _BIAS)[..., None, None]
        return torch.ldexp(grid[codes_OBJ2.int()], exponents_OB11)
