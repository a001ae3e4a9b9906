"""INT4 with a scale for each group of 32: how Kimi K2's experts are published (compressed-tensors).

4.5 bits a weight: (code - 8) times the scale of its group, in bf16. Words of eight codes, the first lowest,
are read as bytes, and then lie as `mxfp4.py`'s do: byte j of a group holds elements 2j (low) and 2j + 1
(high). Not a product: `drafter/compute/layers/moe.py` multiplies with the dequantised tensor, a backend with
packed products reads the bytes.

    NAME_packed   int32 [O, I / 8]        NAME_scale   [O, I / 32]        NAME_shape   [2], O and I again

Legend: E experts, O outputs, I inputs, B = I / 32 groups of a row, J = 16 bytes of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed_4bit import BLOCK, Packed

ZERO = 8  # the code that stands for 0
WORD = 8  # codes of a word


class Int4(Packed):
    """Scales are of the model's dtype. In 16 bits weights are rounded once."""

    __slots__ = ()

    @staticmethod
    def _is_scale(dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    @staticmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        return (codes_OBJ2.float() - ZERO) * scales_OB.float()[..., None, None]


def bytes_of_words(words_OW: Tensor) -> Tensor:
    """A checkpoint's int32 [O, I / 8], or some columns of it -> uint8 [O, I / 32, 16]."""
    assert words_OW.dtype is torch.int32, "words of eight codes"
    return words_OW.contiguous().view(torch.uint8).unflatten(1, (-1, BLOCK // 2))
