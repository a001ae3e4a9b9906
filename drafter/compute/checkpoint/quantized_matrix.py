"""A matrix as codes with shared scales, for backends that multiply with packed weights.

    int8           integers                       value = code * scale
    int4           unsigned integers of 4 bits    value = (code - zero) * scale; a zero of 8 if none is stored
    e4m3           bits of FP8                    value = code * scale
    e2m1           bits of FP4 (`GRID`)           value = code * scale
    int5, int6     unsigned integers              value = (code - 16) * scale, (code - 32) * scale
    uint4, 5, 8    unsigned integers              value = code * scale + offset

A scale or an offset is a number, or an integer times a number of a larger block (`BlockedValues`).
`dequantized` is the definition: a value is computed in fp32 and rounded once to the computing dtype. A
backend's product with the packed matrix has these values, or unrounded ones
(`cpu_fused/tiles/code_tiles.py`).

Legend: O outputs, I inputs, G groups of consecutive inputs of a row that share a scale, B blocks of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Code = Literal["int8", "int4", "e4m3", "e2m1", "int5", "int6", "uint4", "uint5", "uint8"]
CODES: frozenset[Code] = frozenset(get_args(Code))
WITH_OFFSETS: frozenset[Code] = frozenset(("uint4", "uint5", "uint8"))
ON_GPUS: frozenset[Code] = frozenset(("int8", "int4", "e4m3", "e2m1"))  # that kernels unpack
BITS: Mapping[Code, int] = {
    **{code: int(code[-1]) if "int" in code else 8 for code in CODES},
    "e2m1": 4,
}
PAIRED = frozenset(code for code, bits in BITS.items() if bits == 4)  # two codes fit a byte
_ZEROS: Mapping[Code, int] = {"int5": 16, "int6": 32}
QuantizedAtLoad = Literal["int8", "int4"]
SMALLEST_GROUP = 16  # inputs per scale of matrices that stay packed
GROUP = 32  # inputs per scale of matrices that are quantized at load
ZERO = 8  # int4's code of 0 if no zeros are stored
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = _POSITIVE + tuple(-value for value in _POSITIVE)  # e2m1's values by code
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 2.0**100
_MAX_VALUES = 2**22  # converted at once, to stay in a core's cache
_SIGNIFICANT = 32.0  # 2^5: an int4 code times a scale of 5 bits is exact in bf16
_MOST_UINT4 = 15
_FITS = 2  # of scales and offsets; a third lowers the error by 1 %
_BITS_OF_2_TO_MINUS_127 = 1 << 22  # a subnormal float
_FIRST_EXPONENT = 127  # bias of a scale that is stored as an exponent of 2 (E8M0)


@dataclass(frozen=True, slots=True)
class BlockedValues:
    """Values [O, G] in two levels: an integer times a number that a block of groups shares, in fp32.

    Attributes:
        integers_OG: int8 or uint8.
        blocks_OB: fp16; a block has G / B groups.
    """

    integers_OG: Tensor
    blocks_OB: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.integers_OG.shape

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.integers_OG, self.blocks_OB

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockedValues:
        return BlockedValues(change(self.integers_OG), change(self.blocks_OB))

    def float(self) -> Tensor:
        blocks_OB1 = self.blocks_OB.float().unsqueeze(2)
        return (self.integers_OG.float().unflatten(1, (blocks_OB1.shape[1], -1)) * blocks_OB1).flatten(1)


GroupValues = Tensor | BlockedValues


def map_groups(values_OG: GroupValues, change: Callable[[Tensor], Tensor]) -> GroupValues:
    """Apply to each tensor of the values what changes their rows alone."""
    return values_OG.map(change) if isinstance(values_OG, BlockedValues) else change(values_OG)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [O, I], one code per byte.

    Attributes:
        codes_OI: int8 for int8, else uint8.
        scales_OG: fp32, bf16, fp16, or uint8 exponents e of scales 2^(e - 127); or in two levels.
        zeros_OG: uint8, of int4 alone; None for 8.
        offsets_OG: fp32, fp16, or in two levels; of all uint4, uint5 and uint8.
    """

    code: Code
    codes_OI: Tensor
    scales_OG: GroupValues
    zeros_OG: Tensor | None = None
    offsets_OG: GroupValues | None = None

    def __post_init__(self) -> None:
        dtype = torch.int8 if self.code == "int8" else torch.uint8
        assert self.codes_OI.dtype is dtype, "codes have the dtype of their kind"
        assert self.codes_OI.shape[1] % self.scales_OG.shape[1] == 0, "groups have the same size"
        assert (self.offsets_OG is not None) == (self.code in WITH_OFFSETS), "unsigned codes have offsets"

    @property
    def shape(self) -> torch.Size:
        return self.codes_OI.shape

    @property
    def group(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def __len__(self) -> int:
        return len(self.codes_OI)

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        return self.map(lambda tensor: tensor.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """Apply to each tensor what changes their rows alone."""
        return QuantizedMatrix(
            self.code,
            change(self.codes_OI),
            map_groups(self.scales_OG, change),
            None if self.zeros_OG is None else change(self.zeros_OG),
            None if self.offsets_OG is None else map_groups(self.offsets_OG, change),
        )

    def scales(self) -> Tensor:
        """Return the scales in fp32."""
        if isinstance(self.scales_OG, Tensor) and self.scales_OG.dtype is torch.uint8:
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
        values_OGC *= self.scales().unsqueeze(2)
        if self.offsets_OG is not None:
            values_OGC += self.offsets_OG.float().unsqueeze(2)
        return values_OGC.flatten(1)

    def of_kinds(self, kinds: Collection[Code]) -> QuantizedMatrix | None:
        """Return the matrix as codes of one of some kinds, with the same values; None if it cannot be."""
        if self.code in kinds:
            return self
        if "int8" not in kinds or self.code not in _ZEROS:
            return None
        codes_OI = self.codes_OI.view(torch.int8) - _ZEROS[self.code]
        return QuantizedMatrix("int8", codes_OI, self.scales_OG)

    def rows(self, index: slice | Tensor) -> QuantizedMatrix:
        return self.map(lambda tensor: tensor[index])

    def can_stay_packed(self) -> bool:
        """Return whether compiled products take it: even groups, and no value that fp32 flushes."""
        sizes_OG = self.scales().abs()
        in_range = ((sizes_OG >= _SMALLEST_SCALE) & (sizes_OG <= _LARGEST_SCALE)) | (sizes_OG == 0)
        is_number = self.code != "e4m3" or not bool(((self.codes_OI & 0x7F) == 0x7F).any())
        is_even = self.group.bit_count() == 1 and self.group >= SMALLEST_GROUP
        has_shift = self.scales_OG.shape[1] == 1 or is_even
        return self.shape[1] % 32 == 0 and has_shift and bool(in_range.all()) and is_number


Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The rows of several matrices of equally many inputs, which do not all have one form.

    `dtype`: the computing dtype.
    """

    parts: tuple[Matrix, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(map(len, self.parts)), self.parts[0].shape[1]))

    def plain(self) -> Tensor:
        return torch.cat([plain(part, self.dtype) for part in self.parts])


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The codes of a matrix in products; `group` inputs (None: a row) share a scale.

    `shift_bytes` are those of a group's zero or offset, `block_bytes` those of a weight's share of a block.
    """

    code: Code
    group: int | None
    scales: torch.dtype
    shift_bytes: int
    block_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of a weight, with its share of what groups and blocks share."""
        shared = 0.0 if self.group is None else (self.scales.itemsize + self.shift_bytes) / self.group
        shared += self.block_bytes
        return shared + BITS[self.code] / 8

    @property
    def num_codes(self) -> int:
        return 1 << BITS[self.code]


def _decoded(code: Code, codes_OI: Tensor) -> Tensor:
    match code:
        case "int8" | "uint4" | "uint5" | "uint8":
            return codes_OI.float()
        case "int5" | "int6":
            return codes_OI.float() - _ZEROS[code]
        case "int4":
            return codes_OI.float() - ZERO
        case "e4m3":
            return codes_OI.view(torch.float8_e4m3fn).float()
        case "e2m1":
            return torch.tensor(GRID, device=codes_OI.device)[codes_OI.int()]


def join_rows(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix | JoinedRows:
    """Join matrices of equally many inputs; those of one form are one matrix."""
    first = matrices[0]
    if all(isinstance(each, Tensor) for each in matrices):
        return torch.cat([each for each in matrices if isinstance(each, Tensor)])
    alike = [
        each
        for each in matrices
        if isinstance(each, QuantizedMatrix)
        and isinstance(first, QuantizedMatrix)
        and _form(each) == _form(first)
    ]
    if len(alike) < len(matrices):
        return JoinedRows(tuple(matrices), dtype)
    joined = iter([torch.cat(of_part) for of_part in zip(*map(_tensors, alike), strict=True)])
    return alike[0].map(lambda _: next(joined))


def cat_rows(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Join matrices of equally many inputs; dequantizes them to `dtype` unless all have one form."""
    joined = join_rows(matrices, dtype)
    return joined.plain() if isinstance(joined, JoinedRows) else joined


def plain(matrix: Matrix | JoinedRows, dtype: torch.dtype) -> Tensor:
    if isinstance(matrix, JoinedRows):
        return matrix.plain()
    return matrix.dequantized(dtype) if isinstance(matrix, QuantizedMatrix) else matrix


def _form(matrix: QuantizedMatrix) -> tuple[object, ...]:
    return matrix.code, matrix.zeros_OG is None, *((each.shape[1:], each.dtype) for each in _tensors(matrix))


def _tensors(matrix: QuantizedMatrix) -> list[Tensor]:
    """Return the matrix's tensors, in the order of `map`."""
    found = list[Tensor]()
    matrix.map(lambda tensor: found.append(tensor) or tensor)
    return found


def quantize(weight_OI: Tensor, code: Literal["int8", "int4", "uint4"]) -> QuantizedMatrix:
    """Quantize a matrix in groups of 32 inputs of a row, by its weights alone.

    int8 has powers of two as scales (as MXINT8 of OCP's MX specification v1.0): 8.25 bits per weight. int4
    has scales of five significant bits in bf16, with the largest weight of a group near code 0 and the scale
    among three that has the smallest squared error: 4.5 bits. Values of both are exact in bf16. uint4 has a
    scale and an offset in fp16, as GGUF's Q4_1: 5 bits, and 0.87 times the error of int4.
    """
    of_code = {"int8": _quantize_int8, "int4": _quantize_int4, "uint4": _quantize_uint4}[code]
    step = max(_MAX_VALUES // weight_OI.shape[1], 1)
    parts = [
        of_code(weight_OI[i : i + step].float().unflatten(1, (-1, GROUP)))
        for i in range(0, len(weight_OI), step)
    ]
    codes_OI, scales_OG, *offsets = (torch.cat(of_part) for of_part in zip(*parts, strict=True))
    return QuantizedMatrix(code, codes_OI, scales_OG, None, *offsets)


def _quantize_int8(weight_OGC: Tensor) -> tuple[Tensor, Tensor]:
    mantissa_OG, exponent_OG = torch.frexp(weight_OGC.abs().amax(2) / 127)
    exponent_OG -= (mantissa_OG == 0.5).int()  # an exact power of two
    exponent_OG.masked_fill_(mantissa_OG == 0, 0).clamp_(min=-99)
    codes_OGC = torch.ldexp(weight_OGC, -exponent_OG.unsqueeze(2)).round_()
    return codes_OGC.to(torch.int8).flatten(1), (exponent_OG + _FIRST_EXPONENT).to(torch.uint8)


def _quantize_int4(weight_OGC: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales: of three scales the one with the least squared error of its group.

    They put the value of largest magnitude at -8, -7.5 or -7 steps. Scales have few bits, so that a code
    times its scale is exact in bf16.
    """
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


def _quantize_uint4(weight_OGC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and offsets: in turns the nearest codes, and the least squares for them."""
    least_OG1, most_OG1 = weight_OGC.amin(2, keepdim=True), weight_OGC.amax(2, keepdim=True)
    mean_OG1 = weight_OGC.mean(2, keepdim=True)
    scales_OG1, offsets_OG1 = (most_OG1 - least_OG1) / _MOST_UINT4, least_OG1
    for _ in range(_FITS):
        codes_OGC = _nearest(weight_OGC, scales_OG1, offsets_OG1)
        codes_mean_OG1 = codes_OGC.mean(2, keepdim=True)
        spread_OG1 = (codes_OGC - codes_mean_OG1).square_().sum(2, keepdim=True)
        slope_OG1 = (codes_OGC * (weight_OGC - mean_OG1)).sum(2, keepdim=True) / spread_OG1
        # equal weights have no slope
        scales_OG1 = torch.where(spread_OG1 > 0, slope_OG1, scales_OG1)
        offsets_OG1 = mean_OG1 - scales_OG1 * codes_mean_OG1
    most = torch.finfo(torch.float16).max
    scales_OG1, offsets_OG1 = scales_OG1.clamp(max=most).half(), offsets_OG1.clamp(-most, most).half()
    codes_OGC = _nearest(weight_OGC, scales_OG1.float(), offsets_OG1.float())
    return codes_OGC.to(torch.uint8).flatten(1), scales_OG1.squeeze(2), offsets_OG1.squeeze(2)


def _nearest(weight_OGC: Tensor, scales_OG1: Tensor, offsets_OG1: Tensor) -> Tensor:
    shifted_OGC = weight_OGC - offsets_OG1
    return shifted_OGC.div_(scales_OG1.clamp(min=_SMALLEST_SCALE)).round_().clamp_(0, _MOST_UINT4)
