"""MXFP4 codes in the order in which Hopper's matrix instructions take a weight from registers.

A block of 32 inputs is eight lanes of 16 bits; lane j has the codes of inputs j, 8 + j, 16 + j and 24 + j.
Two adjacent lanes fill a register, and the instruction takes two adjacent inputs in a register. So a few
integer instructions make four of its registers of one, and nothing moves between threads.

    bit of a lane      15 14 13 12 | 11 10 9 | 8 7 6 | 5 4 3 | 2 1 0
    of code             2  0  3  1 |    3    |   2   |   1   |   0      signs | magnitudes

Code 2 is where a bf16 has its sign, its two lowest exponent bits and the highest bit of its mantissa; code 1
is three bits below. Arranged at load by `linear/packed_codes.py` where a device has no block-scaled products.

Legend: E experts, O rows of a weight, I inputs, X bytes of a row, B blocks, J = 8 lanes of a block; in the
kernel C rows of a weight's tile, L lanes, G blocks and S inputs of a step.
"""

# Type checkers take compile-time strings for constexpr, and do not know what a jitted function returns.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checkpoint.packed_codes import BLOCK, PackedCodes
from .unpack_codes import HAS_PTX, spread

_SIGN_BITS = (14, 12, 15, 13)
_MAGNITUDE_BITS = (0, 3, 6, 9)
_SCALES_ALIGNED = 8  # blocks: a thread copies at least four scales, fewer cannot be copied asynchronously

# The bf16 of two lanes' codes, divided by 2^126. Code 0's sign and magnitude are placed by one product.
ARRANGED_PTX = tl.constexpr(
    """{
.reg .b32 code, sign;
and.b32 code, $4, 0x40074007;
mul.lo.u32 code, code, 0x42;
and.b32 $0, code, 0x81C081C0;
shl.b32 code, $4, 3;
and.b32 $1, code, 0x81C081C0;
and.b32 $2, $4, 0x81C081C0;
shl.b32 sign, $4, 2;
and.b32 sign, sign, 0x80008000;
shr.u32 code, $4, 3;
and.b32 code, code, 0x01C001C0;
or.b32 $3, code, sign;
}"""
)


def arrange(packed: PackedCodes) -> PackedCodes:
    """Return MXFP4 codes as int16 lanes [..., O, I / 4], with the scales of a row padded with zeros.

    The padding is no part of the scales' shape.
    """
    *matrices, outputs, _ = packed.codes.shape
    lanes = packed.codes.new_empty((*matrices, outputs, packed.in_features // 4), dtype=torch.int16)
    codes_EOX, lanes_EOL = (each.view(-1, *each.shape[-2:]) for each in (packed.codes, lanes))
    for codes_OX, lanes_OL in zip(codes_EOX, lanes_EOL, strict=True):  # to bound the memory of intermediates
        lanes_OL.copy_(_lanes(codes_OX))
    pitch = -(-packed.num_groups // _SCALES_ALIGNED) * _SCALES_ALIGNED
    scales = packed.scales.new_zeros((*matrices, outputs, pitch))[..., : packed.num_groups]
    return replace(packed, codes=lanes, scales=scales.copy_(packed.scales))


def _lanes(codes_OX: Tensor) -> Tensor:
    """Return the lanes of a matrix, in int32."""
    code_OI = torch.stack((codes_OX & 0xF, codes_OX >> 4), dim=-1).flatten(1).to(torch.int32)
    codes_4OBJ = code_OI.unflatten(1, (-1, 4, BLOCK // 4)).movedim(2, 0)
    lanes_OBJ = torch.zeros_like(codes_4OBJ[0])
    for code_OBJ, sign, magnitude in zip(codes_4OBJ, _SIGN_BITS, _MAGNITUDE_BITS, strict=True):
        lanes_OBJ |= (code_OBJ >> 3) << sign | (code_OBJ & 7) << magnitude
    return lanes_OBJ.flatten(1)


@triton.jit
def unpack_arranged(lane_CL, exponent_CG, dtype: tl.constexpr):
    """Return the values of lanes, times their blocks' scales, rounded to `dtype`: [C, S], in order of inputs.

    Exponents are at most `unpack_codes.MAX_EXPONENT`.
    """
    ROWS: tl.constexpr = lane_CL.shape[0]
    LANES: tl.constexpr = lane_CL.shape[1]
    # 2^(exponent - 127), times the 2^126 that a code's bits in a float leave out.
    if dtype == tl.bfloat16 and HAS_PTX:
        factor_CL = spread(((exponent_CG.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True), LANES)
        first_CL, second_CL, third_CL, fourth_CL = tl.inline_asm_elementwise(
            ARRANGED_PTX, "=r,=r,=r,=r,r", [lane_CL], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
        first_CL, second_CL = first_CL * factor_CL, second_CL * factor_CL
        third_CL, fourth_CL = third_CL * factor_CL, fourth_CL * factor_CL
    else:
        factor_CL = spread(((exponent_CG.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True), LANES)
        first_CL = (_value(lane_CL, 14, 0) * factor_CL).to(dtype)
        second_CL = (_value(lane_CL, 12, 3) * factor_CL).to(dtype)
        third_CL = (_value(lane_CL, 15, 6) * factor_CL).to(dtype)
        fourth_CL = (_value(lane_CL, 13, 9) * factor_CL).to(dtype)
    all_CL22 = tl.join(tl.join(first_CL, third_CL), tl.join(second_CL, fourth_CL))
    all_CGJ4 = tl.reshape(all_CL22, (ROWS, LANES // 8, 8, 4))
    return tl.reshape(tl.permute(all_CGJ4, (0, 1, 3, 2)), (ROWS, 4 * LANES))


@triton.jit
def _value(lane_CL, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Return a code's value as fp32, divided by 2^126 (`unpack_codes._value`)."""
    lane_CL = lane_CL.to(tl.int32)
    bits_CL = ((lane_CL >> SIGN) << 31) | (((lane_CL >> MAGNITUDE) & 7) << 22)
    return bits_CL.to(tl.float32, bitcast=True)
