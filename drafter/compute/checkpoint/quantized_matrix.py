"""A matrix as codes with shared scales, for backends that multiply with packed weights.

    int8   integers                             value = code * scale
    int4   unsigned integers of 4 bits          value = (code - zero) * scale; a zero of 8 if none is stored
    e4m3   bits of FP8                          value = code * scale
    e2m1   bits of FP4 (`GRID`)                 value = code * scale

A value is computed in fp32 and rounded once to the computing dtype: `dequantized` is the definition, and a
backend's product with the packed matrix has the bits of a product with the dequantized one.

Legend: O outputs, I inputs, G groups of consecutive inputs of a row that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Code = Literal["int8", "int4", "e4m3", "e2m1"]
QuantizedAtLoad = Literal["int8", "int4"]
GROUP = 32  # inputs per scale of matrices that are quantized at load
ZERO = 8  # int4's code of 0 if no zeros are stored
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = _POSITIVE + tuple(-value for value in _POSITIVE)  # e2m1's values by code
_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "e4m3": torch.uint8, "e2m1": torch.uint8}
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 2.0**100
_MAX_VALUES = 2**22  # converted at once, to stay in a core's cache
_SIGNIFICANT = 32.0  # 2^5: an int4 code times a scale of 5 bits is exact in bf16
_BITS_OF_2_TO_MINUS_127 = 1 << 22  # a subnormal float
_FIRST_EXPONENT = 127  # bias of a scale that is stored as an exponent of 2 (E8M0)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [O, I], one code per byte.

    Attributes:
        codes_OI: int8 for int8, else uint8.
        scales_OG: fp32, bf16, fp16, or uint8 exponents e of scales 2^(e - 127).
        zeros_OG: uint8, of int4 alone; None for 8.
    """

    code: Code
    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes_OI.dtype is _DTYPES[self.code], "codes have the dtype of their kind"
        assert self.codes_OI.shape[1] % self.scales_OG.shape[1] == 0, "groups have the same size"

    @property
    def shape(self) -> torch.Size:
        return self.codes_OI.shape

    @property
    def group(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def __len__(self) -> int:
        return len(self.codes_OI)

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG.to(device)
        return replace(
            self, codes_OI=self.codes_OI.to(device), scales_OG=self.scales_OG.to(device), zeros_OG=zeros_OG
        )

    def scales(self) -> Tensor:
        """Return the scales in fp32."""
        if self.scales_OG.dtype is torch.uint8:
            return (self.scales_OG.int() << 23).clamp_(min=_BITS_OF_2_TO_MINUS_127).view(torch.float32)
        return self.scales_OG.float()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the values [O, I], rounded once to `dtype`."""
        values_OI = torch.empty(self.shape, dtype=dtype, device=self.codes_OI.device)
        step = max(_MAX_VALUES // self.shape[1], 1)
        for start in range(0, len(self), step):
            values_OI[start : start + step] = self.rows(slice(start, start + step))._values()
        return values_OI

    def _values(self) -> Tensor:
        values_OGC = _decoded(self.code, self.codes_OI).unflatten(1, (self.scales_OG.shape[1], -1))
        if self.zeros_OG is not None:
            values_OGC -= self.zeros_OG.float().sub_(ZERO).unsqueeze(2)
        return (values_OGC * self.scales().unsqueeze(2)).flatten(1)

    def rows(self, index: slice | Tensor) -> QuantizedMatrix:
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG[index]
        return replace(
            self, codes_OI=self.codes_OI[index], scales_OG=self.scales_OG[index], zeros_OG=zeros_OG
        )

    def can_stay_packed(self) -> bool:
        """Return whether compiled products take it: groups of 2^n inputs, and no value that fp32 flushes."""
        sizes_OG = self.scales().abs()
        in_range = ((sizes_OG >= _SMALLEST_SCALE) & (sizes_OG <= _LARGEST_SCALE)) | (sizes_OG == 0)
        is_number = self.code != "e4m3" or not bool(((self.codes_OI & 0x7F) == 0x7F).any())
        has_shift = self.scales_OG.shape[1] == 1 or (self.group.bit_count() == 1 and self.group > 1)
        return self.shape[1] % 32 == 0 and has_shift and bool(in_range.all()) and is_number


Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The codes of a matrix in products; `group` inputs (None: a row) share a scale, and a zero if any."""

    code: Code
    group: int | None
    scales: torch.dtype
    zero_bytes: int

    @property
    def bytes(self) -> float:
        """Bytes of a weight, with its share of scales and zeros."""
        shared = 0.0 if self.group is None else (self.scales.itemsize + self.zero_bytes) / self.group
        return shared + (0.5 if self.num_codes == 16 else 1.0)

    @property
    def num_codes(self) -> int:
        return 16 if self.code in ("int4", "e2m1") else 256


def _decoded(code: Code, codes_OI: Tensor) -> Tensor:
    match code:
        case "int8":
            return codes_OI.float()
        case "int4":
            return codes_OI.float() - ZERO
        case "e4m3":
            return codes_OI.view(torch.float8_e4m3fn).float()
        case "e2m1":
            return torch.tensor(GRID, device=codes_OI.device)[codes_OI.int()]


def cat_rows(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Join matrices of equally many inputs; dequantizes them to `dtype` unless all have one form."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if isinstance(first, QuantizedMatrix):
        alike = [
            each for each in matrices if isinstance(each, QuantizedMatrix) and _form(each) == _form(first)
        ]
        if len(alike) == len(matrices):
            zeros = [each.zeros_OG for each in alike if each.zeros_OG is not None]
            return QuantizedMatrix(
                first.code,
                torch.cat([each.codes_OI for each in alike]),
                torch.cat([each.scales_OG for each in alike]),
                torch.cat(zeros) if zeros else None,
            )
    return torch.cat([plain(each, dtype) for each in matrices])


def plain(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return matrix.dequantized(dtype) if isinstance(matrix, QuantizedMatrix) else matrix


def _form(matrix: QuantizedMatrix) -> tuple[object, ...]:
    return matrix.code, matrix.group, matrix.scales_OG.dtype, matrix.zeros_OG is None


def quantize(weight_OI: Tensor, kind: QuantizedAtLoad) -> QuantizedMatrix:
    """Quantize a matrix to values that are exact in bf16, with a scale per 32 inputs of a row.

    int8 has powers of two as scales (as MXINT8 of OCP's MX specification v1.0): 8.25 bits per weight. int4
    has scales of five significant bits in bf16, with the largest weight of a group near code 0 and the scale
    among three that has the smallest squared error: 4.5 bits.
    """
    of_kind = _quantize_int8 if kind == "int8" else _quantize_int4
    step = max(_MAX_VALUES // weight_OI.shape[1], 1)
    parts = [
        of_kind(weight_OI[i : i + step].float().unflatten(1, (-1, GROUP)))
        for i in range(0, len(weight_OI), step)
    ]
    return QuantizedMatrix(kind, *(torch.cat(of_part) for of_part in zip(*parts, strict=True)))


def _quantize_int8(weight_OGC: Tensor) -> tuple[Tensor, Tensor]:
    mantissa_OG, exponent_OG = torch.frexp(weight_OGC.abs().amax(2) / 127)
    exponent_OG -= (mantissa_OG == 0.5).int()  # an exact power of two
    exponent_OG.masked_fill_(mantissa_OG == 0, 0).clamp_(min=-99)
    codes_OGC = torch.ldexp(weight_OGC, -exponent_OG.unsqueeze(2)).round_()
    return codes_OGC.to(torch.int8).flatten(1), (exponent_OG + _FIRST_EXPONENT).to(torch.uint8)


def _quantize_int4(weight_OGC: Tensor) -> tuple[Tensor, Tensor]:
    largest_OG1 = weight_OGC.gather(2, weight_OGC.abs().argmax(2, keepdim=True))
    best_OG1 = scales_OG1 = errors_OG1 = torch.empty(0)
    codes_OGC = weight_OGC
    for i, divisor in enumerate((8.0, 7.5, 7.0)):
        mantissa_OG1, exponent_OG1 = torch.frexp(largest_OG1 / -divisor)
        scales_OG1 = torch.ldexp((mantissa_OG1 * _SIGNIFICANT).round_() / _SIGNIFICANT, exponent_OG1)
        scales_OG1.masked_fill_(scales_OG1.abs() < _SMALLEST_SCALE, 1.0)
        found_OGC = (weight_OGC / scales_OG1).round_().clamp_(-8, 7)
        found_errors_OG1 = (found_OGC * scales_OG1 - weight_OGC).square_().sum(2, keepdim=True)
        if i == 0:
            codes_OGC, best_OG1, errors_OG1 = found_OGC, scales_OG1, found_errors_OG1
            continue
        better_OG1 = found_errors_OG1 < errors_OG1
        codes_OGC = torch.where(better_OG1, found_OGC, codes_OGC)
        best_OG1 = torch.where(better_OG1, scales_OG1, best_OG1)
        errors_OG1 = torch.where(better_OG1, found_errors_OG1, errors_OG1)
    return (codes_OGC + ZERO).to(torch.uint8).flatten(1), best_OG1.squeeze(2).bfloat16()
