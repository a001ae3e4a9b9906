"""Matrices in blocks as a format of quantized checkpoints: rows of bytes (`block_formats.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gguf.constants import GGMLQuantizationType
from torch import Tensor

from ..quantization.scheme import Scheme, StoredForm, enclosing, packed_form, require_finite, require_multiple
from ..quantized_matrix import PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .block_formats import CODED, BlockCodes, block_sizes, codes_of, values_of


@dataclass(frozen=True, slots=True)
class BlockScheme(Scheme):
    """A matrix of one of GGUF's packed types; its shape in the file is [O, bytes of a row]."""

    CODES: ClassVar[str] = "weight"

    type: GGMLQuantizationType

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        return (self.type.name,)

    @property
    def packed_form(self) -> PackedForm | None:
        form = CODED.get(self.type)
        if form is None or form.code == "uint8":
            return None
        return packed_form(form.code, form.group, form.scales)

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
            values = self._finite(codes_of(self.type, blocks), files, module).values()
        else:
            values = values_of(self.type, blocks)
        return values.narrow(1, first, columns.stop - columns.start)

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        form = CODED.get(self.type)
        if form is None or columns.start % form.group or columns.stop % form.group:
            return None
        blocks, first = self._blocks(files, module, rows, columns)
        matrix = self._finite(codes_of(self.type, blocks), files, module).matrix()
        if matrix is None or matrix.shape[1] == columns.stop - columns.start:
            return matrix
        groups = slice(first // form.group, (first + columns.stop - columns.start) // form.group)
        codes_OI = matrix.codes_OI.narrow(1, first, columns.stop - columns.start)
        return QuantizedMatrix(matrix.code, codes_OI.contiguous(), matrix.scales_OG[:, groups].contiguous())

    def _blocks(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> tuple[Tensor, int]:
        """Return the bytes of the blocks that hold the columns, and the first column's offset in them."""
        inputs, size = block_sizes(self.type)
        blocks, first = enclosing(columns, inputs)
        return files.part(f"{module}.weight", rows, slice(blocks.start * size, blocks.stop * size)), first

    def _finite(self, codes: BlockCodes, files: TensorFolder, module: str) -> BlockCodes:
        for numbers in (codes.scales_OG, codes.mins_OG):
            if numbers is not None:
                require_finite(numbers, files, f"{module}.weight")
        return codes
