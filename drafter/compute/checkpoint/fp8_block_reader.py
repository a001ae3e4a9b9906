"""Reads FP8 matrices with block scales (DeepSeek-V3, arXiv 2412.19437, section 3.3) and dequantizes them.

    NAME              e4m3 [O, I]                          w = float(e4m3) * scale of its block
    NAME_scale_inv    fp32 [ceil(O / R), ceil(I / C)]      multiplied, despite its name

Weights take twice the files' size in memory, in 16 bits: nothing is kept packed. Chosen by
`actors/targets/model/weights.py` according to config.json.

Legend: O, I rows and columns of a matrix; R, C those of a block.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError
from .safetensors_reader import FLOATS, TensorFolder

_SCALE = "_scale_inv"


class Fp8Folder(TensorFolder):
    """A `TensorFolder` that dequantizes FP8 matrices to `dtype`; slices need not be aligned to blocks."""

    def __init__(self, folder: str | Path, block: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._block, self._dtype = block, dtype

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        if not self._is_scaled(name):
            return super().check(name, shape, dtypes)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.folder}: {name} is no matrix, but has scales of blocks.", param=name
            )
        super().check(name, shape, ("F8_E4M3",))
        blocks = tuple(-(-size // step) for size, step in zip(shape, self._block, strict=True))
        super().check(name + _SCALE, blocks)

    def refuse_stray_scales(self, read: Collection[str]) -> None:
        super().refuse_stray_scales({*read, *(name + _SCALE for name in read if self._is_scaled(name))})

    def get(self, name: str) -> Tensor:
        weight = super().get(name)
        if not self._is_scaled(name):
            return weight
        return self._scaled(weight, super().get(name + _SCALE), (0, 0))

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        weight = super().slice(name, rows, dim)
        if not self._is_scaled(name):
            return weight
        step = self._block[dim]
        scales = super().slice(name + _SCALE, slice(rows.start // step, -(-rows.stop // step)), dim)
        first = (rows.start % step, 0) if dim == 0 else (0, rows.start % step)
        return self._scaled(weight, scales, first)

    def _is_scaled(self, name: str) -> bool:
        return name + _SCALE in self.shapes

    def _scaled(self, weight_OI: Tensor, scales: Tensor, first: tuple[int, int]) -> Tensor:
        """Dequantize a part of a matrix; `first` is its offset in the first block of `scales`."""
        for dim, (step, begin, size) in enumerate(zip(self._block, first, weight_OI.shape, strict=True)):
            scales = scales.repeat_interleave(step, dim).narrow(dim, begin, size)
        return weight_OI.to(torch.float32).mul_(scales).to(self._dtype)
