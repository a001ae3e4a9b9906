"""Tensors of a GGUF file as a Hugging Face checkpoint has them: stored rows, or what is computed from them.

Stored rows keep their type; packed ones are bytes here, which `block_scheme.py` decodes. What the converter
to GGUF computed, or moved within a row, is undone in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from .block_formats import FLOATS, values_of
from .gguf_file import GgufFile
from .header import TensorInfo

Shape = tuple[int, ...]
INTEGERS: Mapping[GGMLQuantizationType, torch.dtype] = {
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}
RowOrder = Callable[[int], Tensor]  # number of rows -> the file's row of each one


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor of the file, or `count` of its rows from `first` on; `order`: the row of each one shown.

    `dtype` is in safetensors' notation, or the name of a packed type, whose rows are bytes.
    """

    info: TensorInfo
    first: int = 0
    count: int | None = None
    order: RowOrder | None = None

    @property
    def dtype(self) -> str:
        return self.info.type.name

    @property
    def shape(self) -> Shape:
        size = FLOATS[self.info.type].itemsize if self.info.type in FLOATS else 1
        rows = self.info.shape[:-1] if self.count is None else (self.count,)
        return *rows, self.info.row_bytes // size

    def read(self, file: GgufFile, ranges: tuple[slice, ...]) -> Tensor:
        """Return a copy of a part of the tensor, given by a range for each leading dimension."""
        blocks = file.blocks(self.info.name)
        blocks = blocks[self.first :] if self.count is None else blocks[self.first : self.first + self.count]
        shape, dtype = self.shape, FLOATS.get(self.info.type, torch.uint8)
        if len(shape) != 2:
            values = torch.from_numpy(np.array(blocks)).view(dtype).reshape(shape)
            return (values if self.order is None else values[self.order(shape[0])])[ranges].contiguous()
        rows, columns = (*ranges, slice(None), slice(None))[:2]
        start, stop, _ = columns.indices(shape[1])
        wanted = rows if self.order is None else self.order(shape[0])[rows].numpy()
        part = np.array(blocks[wanted, start * dtype.itemsize : stop * dtype.itemsize])
        return torch.from_numpy(part).view(dtype)


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed from others of the file; a part of it takes the work of all."""

    shape: Shape
    compute: Callable[[GgufFile], Tensor]
    dtype: str = "F32"

    def read(self, file: GgufFile, ranges: tuple[slice, ...]) -> Tensor:
        return self.compute(file)[ranges].contiguous()


TensorView = StoredRows | ComputedTensor


def integers(file: GgufFile, name: str) -> Tensor:
    """Return a tensor of integers in its type."""
    info = file.tensors[name]
    return torch.from_numpy(np.array(file.blocks(name))).view(INTEGERS[info.type]).reshape(info.shape)


def values(file: GgufFile, name: str) -> Tensor:
    """Return a tensor of any type in fp32."""
    info = file.tensors[name]
    rows = torch.from_numpy(np.array(file.blocks(name)))
    found = rows.view(FLOATS[info.type]).float() if info.type in FLOATS else values_of(info.type, rows)
    return found.reshape(info.shape)
