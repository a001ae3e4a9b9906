"""Floating-point codes of four bits (E2M1), two per byte, the first in the low nibble: MXFP4 and NVFP4.

    MXFP4               MODULE.weight_packed  uint8 [O, I / 2]   MODULE.weight_scale  uint8 [O, I / 32]
                        w = e2m1 * 2^(scale - 127)                 (OCP MX specification v1.0)
    NVFP4, ModelOpt     MODULE.weight  uint8 [O, I / 2]          MODULE.weight_scale  e4m3 [O, I / 16]
                        w = e2m1 * (scale * weight_scale_2)        weight_scale_2: fp32, of the whole matrix
    NVFP4,              MODULE.weight_packed, MODULE.weight_scale likewise
    compressed-tensors  w = e2m1 * (scale / weight_global_scale)   weight_global_scale: fp32 [1]

The factor of the whole matrix is multiplied or divided first, in fp32, as both formats' own code does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..quantized_matrix import GRID, PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .scheme import (
    Scheme,
    StoredForm,
    aligned_groups,
    enclosing,
    expand,
    packed_form,
    read_scales,
    require_finite,
    require_multiple,
)

_BIAS = 127  # of an MXFP4 scale's exponent
_OF_MATRIX = ((), (1,))


@dataclass(frozen=True, slots=True)
class _Fp4(Scheme):
    """E2M1 codes; `GROUP` elements of a row share a scale of one of `SCALE_DTYPES`."""

    GROUP: ClassVar[int]
    SCALE_DTYPES: ClassVar[tuple[str, ...]]
    SCALES: ClassVar[torch.dtype] = torch.float32  # of groups where products take codes

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        return ("U8",)

    @property
    def packed_form(self) -> PackedForm | None:
        return packed_form("e2m1", self.GROUP, self.SCALES)

    @property
    def dtype(self) -> str:
        return "FP4"

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        rows, columns = (*stored.shapes[self.codes_name(module)], 1, 1)[:2]
        return rows, 2 * columns

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        rows, columns = shape
        require_multiple(stored, module, "inputs", columns, self.GROUP)
        return {
            self.codes_name(module): (((rows, columns // 2),), self.code_dtypes),
            f"{module}.weight_scale": (((rows, columns // self.GROUP),), self.SCALE_DTYPES),
        }

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        values = torch.tensor(GRID)[self._codes(files, module, rows, columns).int()]
        groups, _ = enclosing(columns, self.GROUP)
        scales = self._scales(files, module, read_scales(files, f"{module}.weight_scale", rows, groups))
        return values.mul_(expand(scales, columns, self.GROUP, 1))

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        if (groups := aligned_groups(columns, self.GROUP)) is None:
            return None
        stored = read_scales(files, f"{module}.weight_scale", rows, groups)
        scales_OG = self._packed_scales(files, module, stored)
        if scales_OG is None:
            return None
        return QuantizedMatrix("e2m1", self._codes(files, module, rows, columns), scales_OG)

    def _packed_scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor | None:
        """Return the scales of a `QuantizedMatrix`, or None if it cannot have them."""
        return self._scales(files, module, stored)

    def _codes(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        bytes_range, first = enclosing(columns, 2)
        pairs = files.part(self.codes_name(module), rows, bytes_range)
        codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(1)
        return codes.narrow(1, first, columns.stop - columns.start)

    @abstractmethod
    def _scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor:
        """Return the factors of groups in fp32."""


@dataclass(frozen=True, slots=True)
class Mxfp4Linear(_Fp4):
    """MXFP4 of linear layers (compressed-tensors); `packed_codes.py` has that of gpt-oss's experts."""

    CODES: ClassVar[str] = "weight_packed"
    GROUP: ClassVar[int] = 32
    SCALE_DTYPES: ClassVar[tuple[str, ...]] = ("U8", "F8_E8M0")
    SCALES: ClassVar[torch.dtype] = torch.uint8

    def __str__(self) -> str:
        return "MXFP4"

    def _packed_scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor | None:
        exponents = stored.view(torch.uint8).contiguous()
        return exponents if bool((exponents > 0).all()) else None

    def _scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor:
        exponents = stored.view(torch.uint8).int() - _BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True, slots=True)
class _Nvfp4(_Fp4):
    """NVFP4; `MATRIX_SCALE` names the factor of the whole matrix."""

    GROUP: ClassVar[int] = 16
    SCALE_DTYPES: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    MATRIX_SCALE: ClassVar[str]

    def __str__(self) -> str:
        return "NVFP4"

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        of_groups = _Fp4.parts(self, stored, module, shape)
        return {**of_groups, f"{module}.{self.MATRIX_SCALE}": (_OF_MATRIX, ("F32",))}


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4(_Nvfp4):
    MATRIX_SCALE: ClassVar[str] = "weight_scale_2"

    def _scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor:
        return stored.float() * read_scales(files, f"{module}.{self.MATRIX_SCALE}").reshape(())


@dataclass(frozen=True, slots=True)
class CompressedNvfp4(_Nvfp4):
    CODES: ClassVar[str] = "weight_packed"
    MATRIX_SCALE: ClassVar[str] = "weight_global_scale"

    def _scales(self, files: TensorFolder, module: str, stored: Tensor) -> Tensor:
        name = f"{module}.{self.MATRIX_SCALE}"
        return require_finite(stored.float() / read_scales(files, name).reshape(()), files, name)
