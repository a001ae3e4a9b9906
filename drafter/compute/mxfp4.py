"""MXFP4: weights of four bits, in blocks of 32 that share a power of two (OCP Microscaling Formats, v1.0).

How gpt-oss's experts are published: 4.25 bits a weight. A value is a point of `GRID` (E2M1) times
2^(scale - 127) of its block. Not a product: `experts.py` multiplies with the dequantised tensor, a backend
with packed products reads the bytes as they lie here.

    byte j of a block    | element 2j + 1 | element 2j |      high nibble, low nibble

Legend: E experts, O outputs, I inputs, B = I / 32 blocks of a row, J = 16 bytes of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = _POSITIVE + tuple(-value for value in _POSITIVE)  # by code
_BIAS = 127  # of a scale's exponent


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Weights [E, O, I], packed along their inputs.

    Attributes:
        blocks_EOBJ: uint8 [E, O, I / 32, 16], two codes a byte.
        scales_EOB: uint8 [E, O, I / 32], biased exponents; 255 stands for no number.
    """

    blocks_EOBJ: Tensor
    scales_EOB: Tensor

    def __post_init__(self) -> None:
        blocks, scales = self.blocks_EOBJ, self.scales_EOB
        assert blocks.dtype is scales.dtype is torch.uint8, "packed weights are bytes"
        assert blocks.shape == (*scales.shape, BLOCK // 2), "one scale for each block of 16 bytes"

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, O, I] of the weights."""
        experts, outputs, blocks = self.scales_EOB.shape
        return experts, outputs, blocks * BLOCK

    @property
    def device(self) -> torch.device:
        return self.blocks_EOBJ.device

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [E, O, I]; exact in bf16 and fp32, and in fp16 where their exponent fits."""
        weights_EOI = torch.empty(self.shape, dtype=dtype, device=self.device)
        # Expert by expert: what is in between is four times as large as the result.
        for weights_OI, blocks_OBJ, scales_OB in zip(
            weights_EOI, self.blocks_EOBJ, self.scales_EOB, strict=True
        ):
            weights_OI.copy_(_dequantised(blocks_OBJ, scales_OB))
        return weights_EOI


def _dequantised(blocks_OBJ: Tensor, scales_OB: Tensor) -> Tensor:
    """One expert's weights, fp32 [O, I]."""
    grid = torch.tensor(GRID, device=blocks_OBJ.device)
    codes_OBJ2 = torch.stack((blocks_OBJ & 0xF, blocks_OBJ >> 4), dim=-1)
    values_OBJ2 = grid[codes_OBJ2.int()]
    exponents_OB11 = (scales_OB.int() - _BIAS)[..., None, None]
    return torch.ldexp(values_OBJ2, exponents_OB11).flatten(1)
