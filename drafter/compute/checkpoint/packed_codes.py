"""Matrices of codes in memory: two codes of four bits per byte, one or several matrices of one form.

    byte j of a row of four-bit codes    | input 2j + 1 | input 2j |      high nibble, low nibble

gpt-oss's experts are published so, in MXFP4 (OCP MX specification v1.0). Kept by GPUs, and by experts until a
backend makes products of them.

Legend: E experts, O outputs, I inputs, G groups of a row, B blocks of a row, J = 16 bytes of a block, X bytes
of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .quantized_matrix import PAIRED, ZERO, Code, GroupValues, Matrix, QuantizedMatrix

BLOCK = 32  # inputs that share a scale in MXFP4
WHOLE_ROW = 1 << 30  # inputs of a group that all inputs are in


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A matrix [O, I], or E of them.

    Attributes:
        codes: uint8 [..., O, I], or float8_e4m3fn where kernels convert it; four bits: uint8 [..., O, I / 2],
            or int16 [..., O, I / 4] as a GPU's kernel takes them (`gpu_triton/common/arranged_codes.py`).
        scales, zeros, offsets: [..., O, G], as `QuantizedMatrix` has them, in one level.
    """

    code: Code
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, matrix: QuantizedMatrix) -> PackedCodes:
        codes = matrix.codes_OI.view(torch.uint8)
        if matrix.code in PAIRED:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        zeros = None if matrix.zeros_OG is None else matrix.zeros_OG.contiguous()
        offsets = None if matrix.offsets_OG is None else _in_one_level(matrix.offsets_OG)
        return cls(matrix.code, codes.contiguous(), _in_one_level(matrix.scales_OG), zeros, offsets)

    @classmethod
    def mxfp4(cls, blocks_EOBJ: Tensor, scales_EOB: Tensor) -> PackedCodes:
        """Return gpt-oss's experts as they are published."""
        assert blocks_EOBJ.shape == (*scales_EOB.shape, BLOCK // 2), "a scale for 16 bytes"
        return cls("e2m1", blocks_EOBJ.flatten(-2), scales_EOB)

    @property
    def has_pairs(self) -> bool:
        return self.code in PAIRED

    @property
    def is_mxfp4(self) -> bool:
        return self.code == "e2m1" and self.scales.dtype is torch.uint8

    @property
    def is_arranged(self) -> bool:
        return self.codes.dtype is torch.int16

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.in_features))

    @property
    def in_features(self) -> int:
        return self.codes.shape[-1] * (2 * self.codes.itemsize if self.has_pairs else 1)

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def group(self) -> int:
        """Inputs of a group, a power of two."""
        return self.in_features // self.num_groups if self.num_groups > 1 else WHOLE_ROW

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.offsets)
        return sum(each.nbytes for each in tensors if each is not None)

    def matrix(self, expert: int) -> QuantizedMatrix:
        """Return one of E matrices."""
        assert not self.is_arranged, "arranged codes are for kernels"
        codes_OX = self.codes[expert].view(torch.uint8)
        if self.has_pairs:
            codes_OX = torch.stack((codes_OX & 0xF, codes_OX >> 4), dim=-1).flatten(1)
        zeros_OG = None if self.zeros is None else self.zeros[expert]
        offsets_OG = None if self.offsets is None else self.offsets[expert]
        codes_OI = codes_OX.view(torch.int8) if self.code == "int8" else codes_OX
        return QuantizedMatrix(self.code, codes_OI, self.scales[expert], zeros_OG, offsets_OG)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the values of E matrices, [E, O, I]."""
        values_EOI = torch.empty(self.shape, dtype=dtype, device=self.device)
        for expert, values_OI in enumerate(values_EOI):  # one by one, to bound the memory of intermediates
            values_OI.copy_(self.matrix(expert).dequantized(dtype))
        return values_EOI

    def _is_like(self, other: PackedCodes) -> bool:
        forms = ((each.code, each.shape[-2:], each.num_groups, each.scales.dtype) for each in (self, other))
        return next(forms) == next(forms)


def _in_one_level(values_OG: GroupValues) -> Tensor:
    return values_OG.contiguous() if isinstance(values_OG, Tensor) else values_OG.float()


def stack(matrices: Iterable[Matrix], count: int) -> Tensor | PackedCodes | None:
    """Return E matrices as one tensor [E, O, I] or as codes; None if others have other codes than the first.

    Memory is allocated once the form of the first is known, so that no matrix is held twice.
    """
    held: Tensor | PackedCodes | None = None
    for expert, matrix in enumerate(matrices):
        if isinstance(matrix, Tensor):
            held = matrix.new_empty(count, *matrix.shape) if held is None else held
            if not isinstance(held, Tensor):
                return None
            held[expert] = matrix
        elif isinstance(held, Tensor):
            held[expert] = matrix.dequantized(held.dtype)
        else:
            packed = PackedCodes.of(matrix)
            held = _empty(packed, count) if held is None else held
            if not held._is_like(packed):
                return None
            held = _with_zeros(held, packed)
            held.codes[expert], held.scales[expert] = packed.codes, packed.scales
            if held.zeros is not None:
                held.zeros[expert] = ZERO if packed.zeros is None else packed.zeros
            if held.offsets is not None and packed.offsets is not None:
                held.offsets[expert] = packed.offsets
    return held


def _empty(packed: PackedCodes, count: int) -> PackedCodes:
    codes, scales, offsets = (
        None if each is None else each.new_empty(count, *each.shape)
        for each in (packed.codes, packed.scales, packed.offsets)
    )
    assert codes is not None and scales is not None, "codes have scales"
    return PackedCodes(packed.code, codes, scales, offsets=offsets)


def _with_zeros(held: PackedCodes, packed: PackedCodes) -> PackedCodes:
    """Return codes that have zeros if `packed` has: a matrix comes without if all of its zeros are 8."""
    if held.zeros is not None or packed.zeros is None:
        return held
    return replace(held, zeros=torch.full_like(held.scales, ZERO, dtype=torch.uint8))
