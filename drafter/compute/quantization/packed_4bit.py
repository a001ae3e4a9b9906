"""4-bit weights, two per byte, in blocks of 32 that share a scale: what MXFP4 and INT4 have in common.

Each format defines codes and scales (`mxfp4.py`, `int4.py`). `drafter/compute/layers/moe.py` computes with
them.

Legend: E experts, O outputs, I inputs, B = I / 32 blocks of a row, J = 16 bytes of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Packed(ABC):
    """Weights [E, O, I], packed along their inputs.

    Attributes:
        blocks_EOBJ: uint8 [E, O, I / 32, 16], two codes a byte.
        scales_EOB: [E, O, I / 32], as the format stores them.
    """

    blocks_EOBJ: Tensor
    scales_EOB: Tensor

    def __post_init__(self) -> None:
        assert self.blocks_EOBJ.dtype is torch.uint8, "packed weights are bytes"
        assert self._is_scale(self.scales_EOB.dtype), "scales are as the format has them"
        assert self.blocks_EOBJ.shape == (*self.scales_EOB.shape, BLOCK // 2), "a scale for 16 bytes"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape [E, O, I] of the weights."""
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
    def _is_scale(dtype: torch.dtype) -> bool:
        """Return whether the format's scales have this dtype."""

    @staticmethod
    @abstractmethod
    def _values(codes_OBJ2: Tensor, scales_OB: Tensor) -> Tensor:
        """Return one expert's weights, fp32 [O, B, J, 2], from uint8 codes 0 to 15."""
