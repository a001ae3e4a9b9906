"""Matrices in blocks as a format of quantized checkpoints: rows of bytes (`block_formats.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from ..quantization.scheme import Scheme, StoredForm, enclosing, require_finite, require_multiple
from ..quantized_matrix import BlockedValues, PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .block_formats import CODED, block_sizes, codes_of, values_of


@dataclass(frozen=True, slots=True)
class BlockScheme(Scheme):
    """A matrix of one of GGUF's packed types; its shape in the file is [O, bytes of a row]."""

    type: GGMLQuantizationType

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        return (self.type.name,)

    @property
    def packed_form(self) -> PackedForm | None:
        form = CODED.get(self.type)
        return None if form is None else form.form

    @property
    def dtype(self) -> str:
        return self.type.name

    def __str__(self) -> str:
        return self.type.name

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        inputs, size = block_sizes(self.type)
        rows, row_bytes = (*stored.shapes[f"{module}.weight"], 1)[:2]
        return rows, row_bytes // size * inputs

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        inputs, size = block_sizes(self.type)
        require_multiple(stored, module, "inputs", shape[1], inputs)
        return {f"{module}.weight": (((shape[0], shape[1] // inputs * size),), self.code_dtypes)}

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        blocks, first = self._blocks(files, module, rows, columns)
        if self.type in CODED:
            values = self._codes(blocks, files, module).dequantized(torch.float32)
        else:
            values = values_of(self.type, blocks)
        return values.narrow(1, first, columns.stop - columns.start)

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        inputs, _ = block_sizes(self.type)
        if self.type not in CODED or columns.start % inputs or columns.stop % inputs:
            return None
        return self._codes(self._blocks(files, module, rows, columns)[0], files, module)

    def _blocks(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> tuple[Tensor, int]:
        """Return the bytes of the blocks that hold the columns, and the first column's offset in them."""
        inputs, size = block_sizes(self.type)
        blocks, first = enclosing(columns, inputs)
        return files.part(f"{module}.weight", rows, slice(blocks.start * size, blocks.stop * size)), first

    def _codes(self, blocks: Tensor, files: TensorFolder, module: str) -> QuantizedMatrix:
        matrix = codes_of(self.type, blocks)
        for numbers in (matrix.scales_OG, matrix.offsets_OG):
            if isinstance(numbers, BlockedValues):
                numbers = numbers.blocks_OB
            if numbers is not None:
                require_finite(numbers, files, f"{module}.weight")
        return matrix
