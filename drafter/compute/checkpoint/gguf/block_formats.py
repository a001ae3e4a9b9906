"""Types of GGUF's tensors: rows of blocks as codes with shared scales, and as numbers.

    value = code * scale           Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, Q8_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4,
                                   NVFP4
    value = code * scale + offset  Q4_1, Q5_1, Q2_K, Q4_K, Q5_K

Values are computed in fp32 and equal those of `gguf.quants.dequantize`, which also decodes the types without
codes here (IQ1 to IQ3). A block of the K types has 256 inputs in 8 or 16 groups, each of whose scales is the
product of a small integer and the block's own scale, as `BlockedValues` has them.

Legend: O rows, B blocks of a row, X bytes of a block, I inputs, G groups of inputs with a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..quantized_matrix import ZERO, BlockedValues, Code, PackedForm, QuantizedMatrix

Type = GGMLQuantizationType

FLOATS: Mapping[Type, torch.dtype] = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
    Type.F64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A type with codes: decodes blocks, uint8 [O, B, X], to a matrix of the form."""

    form: PackedForm
    decode: Callable[[Tensor], QuantizedMatrix]


def block_sizes(kind: Type) -> tuple[int, int]:
    """Return the inputs and the bytes of a block."""
    return GGML_QUANT_SIZES[kind]


def is_read(kind: Type) -> bool:
    return kind in FLOATS or kind in CODED or kind in _NUMBERS_ONLY


def codes_of(kind: Type, rows: Tensor) -> QuantizedMatrix:
    """Return rows of whole blocks, uint8 [O, bytes], as codes; `kind` is one of `CODED`."""
    return CODED[kind].decode(rows.unflatten(1, (-1, block_sizes(kind)[1])))


def values_of(kind: Type, rows: Tensor) -> Tensor:
    """Return the values of rows of whole blocks, uint8 [O, bytes], in fp32."""
    if kind in CODED:
        return codes_of(kind, rows).dequantized(torch.float32)
    return torch.from_numpy(quants.dequantize(rows.numpy(), kind))


def _half(blocks_OBX: Tensor, at: int) -> Tensor:
    return blocks_OBX[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _fields(bytes_: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Return the bits of bytes [..., N] at each shift: [..., shifts, N]."""
    shifts_S1 = torch.tensor(shifts, dtype=torch.uint8).unsqueeze(1)
    return bytes_.unsqueeze(-2) >> shifts_S1 & mask


def _nibbles(bytes_: Tensor, width: int) -> Tensor:
    """Return nibbles [O, B, 2 N] of bytes [O, B, N]: for each `width` bytes their low ones first."""
    return _fields(bytes_.unflatten(-1, (-1, width)), (0, 4), 0xF).flatten(-3)


def _two_bits(bytes_: Tensor) -> Tensor:
    """Return pairs of bits [O, B, 4 N]; of each 32 bytes the lowest pairs first."""
    return _fields(bytes_.unflatten(-1, (-1, 32)), (0, 2, 4, 6), 3).flatten(-3)


def _bits(bytes_: Tensor) -> Tensor:
    """Return the bits of 32 bytes, [O, B, 256], the lowest of each byte first."""
    return _fields(bytes_, range(8), 1).flatten(-2)


def _fifth_bits(blocks_OBX: Tensor, at: int) -> Tensor:
    """Return a bit per input [O, B, 32] of four bytes, in place of a fifth bit."""
    bytes_ = blocks_OBX[..., at : at + 4].unsqueeze(-1)
    return (bytes_ >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _signed(codes_OBC: Tensor, zero: int) -> Tensor:
    return (codes_OBC.view(torch.int8) - zero).flatten(1)


def _q4_0(blocks: Tensor) -> QuantizedMatrix:
    return QuantizedMatrix("int4", _nibbles(blocks[..., 2:], 16).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., 4:], 16).flatten(1)
    return QuantizedMatrix("uint4", codes, _half(blocks, 0), None, _half(blocks, 2))


def _q5_0(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2)
    return QuantizedMatrix("int5", codes.flatten(1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4)
    return QuantizedMatrix("uint5", codes.flatten(1), _half(blocks, 0), None, _half(blocks, 2))


def _q8_0(blocks: Tensor) -> QuantizedMatrix:
    return QuantizedMatrix("int8", _signed(blocks[..., 2:].contiguous(), 0), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> QuantizedMatrix:
    scales, mins = blocks[..., :16] & 0xF, blocks[..., :16] >> 4
    codes = _two_bits(blocks[..., 16:80]).flatten(1)
    return _with_mins("uint4", codes, _half(blocks, 80), scales, _half(blocks, 82), mins)


def _q3_k(blocks: Tensor) -> QuantizedMatrix:
    low, high = _nibbles(blocks[..., 96:104], 8), _fields(blocks[..., 104:108], (0, 2, 4, 6), 3).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _two_bits(blocks[..., 32:96]) | _bits(blocks[..., :32]) << 2
    return QuantizedMatrix("int4", codes.flatten(1) + (ZERO - 4), _scaled(_half(blocks, 108), scales))


def _q4_k(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., 16:], 32).flatten(1)
    return _with_mins("uint4", codes, _half(blocks, 0), *_six_bits(blocks))


def _q5_k(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48]) << 4
    return _with_mins("uint5", codes.flatten(1), _half(blocks, 0), *_six_bits(blocks))


def _q6_k(blocks: Tensor) -> QuantizedMatrix:
    codes = _nibbles(blocks[..., :128], 64) | _two_bits(blocks[..., 128:192]) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantizedMatrix("int6", codes.flatten(1), _scaled(_half(blocks, 208), scales))


def _q8_k(blocks: Tensor) -> QuantizedMatrix:
    scales = blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)
    return QuantizedMatrix("int8", _signed(blocks[..., 4:260].contiguous(), 0), scales)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return six-bit scales [O, B, 8], the factor [O, B] of mins, and six-bit mins [O, B, 8]."""
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 0x3F, third & 0xF | first >> 2 & 0x30), dim=-1)
    mins = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=-1)
    return scales, _half(blocks, 2), mins


def _with_mins(
    code: Code, codes_OI: Tensor, scale_OB: Tensor, scales: Tensor, min_OB: Tensor, mins: Tensor
) -> QuantizedMatrix:
    """Return codes from which the product of a block's and a group's minimum is subtracted."""
    return QuantizedMatrix(code, codes_OI, _scaled(scale_OB, scales), None, _scaled(-min_OB, mins))


def _scaled(factor_OB: Tensor, integers_OBS: Tensor) -> BlockedValues:
    return BlockedValues(integers_OBS.flatten(1), factor_OB)


# Values of the codes of IQ4_NL and IQ4_XS.
_NEGATIVE_ZERO, _NO_NUMBER = 0x8, 0x7F  # of E2M1 and E4M3
_NON_LINEAR = torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.int8)


def _iq4_nl(blocks: Tensor) -> QuantizedMatrix:
    codes = _NON_LINEAR[_nibbles(blocks[..., 2:], 16).flatten(1).int()]
    return QuantizedMatrix("int8", codes, _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> QuantizedMatrix:
    low = _fields(blocks[..., 4:8].unsqueeze(-1), (0, 4), 0xF).flatten(-3)
    high = _fields(blocks[..., 2:4].unsqueeze(-1), (0, 2, 4, 6), 3).flatten(-3)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _NON_LINEAR[_nibbles(blocks[..., 8:], 16).flatten(1).int()]
    return QuantizedMatrix("int8", codes, _scaled(_half(blocks, 0), scales))


def _tq2_0(blocks: Tensor) -> QuantizedMatrix:
    codes = _two_bits(blocks[..., :64]).flatten(1)
    return QuantizedMatrix("int4", codes + (ZERO - 1), _half(blocks, 64))


def _tq1_0(blocks: Tensor) -> QuantizedMatrix:
    """Return codes of five in a byte: the digits of a fraction to the base 3."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(1)
    parts = (blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4)
    digits = torch.cat([(part.unsqueeze(-2) * powers[:num]).flatten(-2) for part, num in parts], dim=-1)
    codes = (digits.to(torch.int16) * 3 >> 8).to(torch.uint8)
    return QuantizedMatrix("int4", codes.flatten(1) + (ZERO - 1), _half(blocks, 52))


def _mxfp4(blocks: Tensor) -> QuantizedMatrix:
    """Return codes with the stored exponents: GGUF's scales are half of them, and its codes' values twice."""
    return QuantizedMatrix("e2m1", _e2m1(_nibbles(blocks[..., 1:], 16)), blocks[..., 0].contiguous())


def _nvfp4(blocks: Tensor) -> QuantizedMatrix:
    scales = blocks[..., :4].masked_fill(blocks[..., :4] == _NO_NUMBER, 0) & 0x7F
    return QuantizedMatrix(
        "e2m1", _e2m1(_nibbles(blocks[..., 4:], 8)), scales.view(torch.float8_e4m3fn).float().flatten(1)
    )


def _e2m1(codes_OBC: Tensor) -> Tensor:
    """Return codes without the negative zero, which is 0 in GGUF."""
    return codes_OBC.masked_fill_(codes_OBC == _NEGATIVE_ZERO, 0).flatten(1)


CODED: Mapping[Type, BlockFormat] = {
    Type.Q4_0: BlockFormat(PackedForm("int4", 32, torch.float16, 0), _q4_0),
    Type.Q4_1: BlockFormat(PackedForm("uint4", 32, torch.float16, 2), _q4_1),
    Type.Q5_0: BlockFormat(PackedForm("int5", 32, torch.float16, 0), _q5_0),
    Type.Q5_1: BlockFormat(PackedForm("uint5", 32, torch.float16, 2), _q5_1),
    Type.Q8_0: BlockFormat(PackedForm("int8", 32, torch.float16, 0), _q8_0),
    Type.Q2_K: BlockFormat(PackedForm("uint4", 16, torch.uint8, 1, 4 / 256), _q2_k),
    Type.Q3_K: BlockFormat(PackedForm("int4", 16, torch.int8, 0, 2 / 256), _q3_k),
    Type.Q4_K: BlockFormat(PackedForm("uint4", 32, torch.uint8, 1, 4 / 256), _q4_k),
    Type.Q5_K: BlockFormat(PackedForm("uint5", 32, torch.uint8, 1, 4 / 256), _q5_k),
    Type.Q6_K: BlockFormat(PackedForm("int6", 16, torch.int8, 0, 2 / 256), _q6_k),
    Type.Q8_K: BlockFormat(PackedForm("int8", 256, torch.float32, 0), _q8_k),
    Type.IQ4_NL: BlockFormat(PackedForm("int8", 32, torch.float16, 0), _iq4_nl),
    Type.IQ4_XS: BlockFormat(PackedForm("int8", 32, torch.int8, 0, 2 / 256), _iq4_xs),
    Type.TQ1_0: BlockFormat(PackedForm("int4", 256, torch.float16, 0), _tq1_0),
    Type.TQ2_0: BlockFormat(PackedForm("int4", 256, torch.float16, 0), _tq2_0),
    Type.MXFP4: BlockFormat(PackedForm("e2m1", 32, torch.uint8, 0), _mxfp4),
    Type.NVFP4: BlockFormat(PackedForm("e2m1", 16, torch.float32, 0), _nvfp4),
}
_NUMBERS_ONLY = frozenset(
    {Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S}
)
