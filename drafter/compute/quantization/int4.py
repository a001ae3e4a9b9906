"""INT4 with a scale per group of 32, the format of Kimi K2's published experts (compressed-tensors).

4.5 bits per weight: (code - 8) times the bf16 scale of its group. Words of eight codes, the first lowest, are
viewed as bytes, which gives the layout of `mxfp4.py`: byte j of a group holds elements 2j (low) and 2j + 1
(high). `drafter/compute/layers/moe.py` multiplies with the dequantized tensor, backends with packed GEMMs
read the bytes.

    NAME_packed   int32 [O, I / 8]        NAME_scale   [O, I / 32]        NAME_shape   [2], O and I again

Legend: E experts, O outputs, I inputs, B = I / 32 groups of a row, J = 16 bytes of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed_4bit import BLOCK, Packed

ZERO = 8  # the code of 0
WORD = 8  # codes per word


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
