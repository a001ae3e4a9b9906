"""4-bit weights, two per byte, in blocks of 32 that share a scale: MXFP4 and INT4.

    MXFP4   gpt-oss's experts, 4.25 bits per weight (OCP MX specification v1.0): an element of `GRID` (E2M1)
            times 2^(scale - 127) of its block
    Int4    Kimi K2's experts, 4.5 bits per weight (compressed-tensors): (code - 8) times the bf16 scale of
            its block
    byte j of a block    | element 2j + 1 | element 2j |      high nibble, low nibble

Published INT4 files have words of eight codes, the first lowest, with these bytes:

    NAME_packed   int32 [O, I / 8]        NAME_scale   [O, I / 32]        NAME_shape   [2], O and I again

Legend: E experts, O outputs, I inputs, B = I / 32 blocks of a row, J = 16 bytes of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
ZERO, WORD = 8, 8  # of INT4: the code of 0; codes per word
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = _POSITIVE + tuple(-value for value in _POSITIVE)  # of MXFP4, by code
_BIAS = 127  # of an MXFP4 scale's exponent


@dataclass(frozen=True, slots=True)
class Packed(ABC):
    """Weights [E, O, I] as uint8 blocks [E, O, I / 32, 16] along the inputs, two codes a byte.

    Scales [E, O, I / 32] are as the format stores them.
    """

    blocks_EOBJ: Tensor
    scales_EOB: Tensor

    def __post_init__(self) -> None:
        assert self.blocks_EOBJ.dtype is torch.uint8, "packed weights are bytes"
        assert self._is_scale(self.scales_EOB.dtype), "scales are as the format has them"
        assert self.blocks_EOBJ.shape == (*self.scales_EOB.shape, BLOCK // 2), "a scale for 16 bytes"

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, blocks = self.scales_EOB.shape
        return experts, outputs, blocks * BLOCK

    @property
    def device(self) -> torch.device:
        return self.blocks_EOBJ.device

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, O, I]: exact in fp32; for 16 bits see the format."""
        weights_EOI = torch.empty(self.shape, dtype=dtype, device=self.device)
        # Expert by expert, because intermediates are four times as large as the result.
        for weights_OI, blocks_OBJ, scales_OB in zip(
            weights_EOI, self.blocks_EOBJ, self.scales_EOB, strict=True
        ):
            codes_OBJ2 = torch.stack((blocks_OBJ & 0xF, blocks_OBJ >> 4), dim=-1)
            weights_OI.copy_(self._values(codes_OBJ2, scales_OB).flatten(1))
        return weights_EOI

    @staticmethod
    @abstractmethod
    def _is_scale(dtype: torch.dtype) -> bool: ...

    @staticmethod
    @abstractmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        """Return one expert's weights, fp32 [O, B, J, 2], from uint8 codes 0 to 15."""


class MXFP4(Packed):
    """MXFP4 weights; scales are uint8 exponents (255: NaN). Exact in bf16, and in fp16 if they fit."""

    __slots__ = ()

    @staticmethod
    def _is_scale(dtype: torch.dtype) -> bool:
        return dtype is torch.uint8

    @staticmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        grid = torch.tensor(GRID, device=codes_OBJ2.device)
        exponents_OB11 = (scales_OB.int() - _BIAS)[..., None, None]
        return torch.ldexp(grid[codes_OBJ2.int()], exponents_OB11)


class Int4(Packed):
    """INT4 weights; scales are of the model's dtype. Dequantized 16-bit weights are rounded once."""

    __slots__ = ()

    @staticmethod
    def _is_scale(dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    @staticmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        return (codes_OBJ2.float() - ZERO) * scales_OB.float()[..., None, None]


def bytes_of_words(words_OW: Tensor) -> Tensor:
    """View int32 [O, I / 8] of a checkpoint, or some columns of it, as uint8 [O, I / 32, 16]."""
    assert words_OW.dtype is torch.int32, "words of eight codes"
    return words_OW.contiguous().view(torch.uint8).unflatten(1, (-1, BLOCK // 2))
