"""Unpacks weights of 8 and 4 bits in a kernel's registers, each code times the scale of its group.

The formats are those of `compute/checkpoint/quantized_matrix.py`; a value is rounded once to the computing
dtype. A byte holds two adjacent inputs of 4 bits. They are multiplied separately: low codes with the even
inputs of x, high codes with the odd ones, which share a word of x. So nothing is shuffled, neither at load
nor in the kernel. MXFP4 is so on Blackwell alone; elsewhere see `arranged_codes.py`. Called by
`linear/packed_codes.py`.

In bf16 two codes are unpacked at a time, as two floats share a register: integer instructions put their bits
in place (`E2M1_PTX`, `INT4_PTX`), and packed products scale them. The result is the same as through fp32, a
code times its scale, rounded once, in 40 % fewer instructions, which bound these kernels.

Legend: C rows of a weight's tile, B bytes of a step, S inputs of a step, G groups of a step, M rows of x.
"""

# Type checkers take compile-time strings for constexpr, and do not know what a jitted function returns.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

from ...checkpoint.quantized_matrix import ZERO

MAX_EXPONENT = 128  # of an MXFP4 block's scale: 2, so that a code's factor fits in fp32
_FIRST_WITH_TENSOR_MEMORY = (10, 0)
_ZERO = tl.constexpr(ZERO)
HAS_PTX = tl.constexpr(not os.environ.get("TRITON_INTERPRET") and torch.version.hip is None)
_BF16_OF_CODE_0 = tl.constexpr(128.0 + ZERO)  # of INT4, see `INT4_PTX`
_BF16_128 = tl.constexpr(0x4300)  # bits of 128
_FP32_2_TO_23 = tl.constexpr(0x4B000000)  # bits of 2^23, whose last place is 1
_E2M1_FACTOR = tl.constexpr(2.0**126)  # what a code's bits in a float of 8 exponent bits leave out
_E4M3_FACTOR = tl.constexpr(2.0**8)  # and of an e4m3 code in fp16
_FOUR_BITS = tl.constexpr(-1 << 20)  # sign, exponent and three bits after the first in fp32


# Two codes' signs and magnitudes to a float's fields, by a product, as `_value` does.
_E2M1_PAIR = """
and.b32 code, both, 0x000F000F;
mul.lo.u32 code, code, 0x1040;
and.b32 LOW, code, 0x81C081C0;
and.b32 code, both, 0x00F000F0;
mul.lo.u32 code, code, 0x104;
and.b32 HIGH, code, 0x81C081C0;
"""
# Two codes to the mantissa of 128: 128 + code.
_INT4_PAIR = """
and.b32 code, both, 0x000F000F;
or.b32 LOW, code, 0x43004300;
shr.u32 both, both, 4;
and.b32 code, both, 0x000F000F;
or.b32 HIGH, code, 0x43004300;
"""


def _unpacking_ptx(of_pair: str, num_bytes: int) -> str:
    """Return PTX that turns bytes, its last operand, into the bf16 of their low, then of their high codes.

    `of_pair` does so for two bytes, in the halves of `both`.
    """
    given = "cvt.u32.u16 bytes, $2;" if num_bytes == 2 else "mov.b32 bytes, $4;"
    lines = ["{", ".reg .b32 bytes, both, code;", given]
    for pair, halves in enumerate(("0x4140", "0x4342")[: num_bytes // 2]):
        lines.append(f"prmt.b32 both, bytes, 0, {halves};")
        lines.append(of_pair.replace("LOW", f"${pair}").replace("HIGH", f"${num_bytes // 2 + pair}").strip())
    return "\n".join([*lines, "}"])


# Two INT8 codes to the last places of 1024 in fp16: 1024 + 128 + code.
INT8_PTX = tl.constexpr(
    """{
.reg .b32 bytes;
cvt.u32.u16 bytes, $1;
prmt.b32 bytes, bytes, 0x64646464, 0x4140;
xor.b32 $0, bytes, 0x00800080;
}"""
)
E2M1_PTX, INT4_PTX = (
    {num_bytes: tl.constexpr(_unpacking_ptx(pair, num_bytes)) for num_bytes in (2, 4)}
    for pair in (_E2M1_PAIR, _INT4_PAIR)
)
_E2M1_2, _E2M1_4, _INT4_2, _INT4_4 = E2M1_PTX[2], E2M1_PTX[4], INT4_PTX[2], INT4_PTX[4]


@cache
def bytes_at_once(device: torch.device) -> int:
    """Return how many bytes of a row a thread unpacks together: 2 until Hopper, 4 from Blackwell on.

    So many are adjacent in the registers that the matrix instructions take weights from.
    """
    if device.type != "cuda" or torch.version.hip:
        return 2
    return 4 if torch.cuda.get_device_capability(device) >= _FIRST_WITH_TENSOR_MEMORY else 2


@triton.jit
def unpack_mxfp4(byte_CB, exponent_CG, dtype: tl.constexpr, PACK: tl.constexpr):
    """Return low and high codes of packed bytes, times their blocks' scales, rounded to `dtype`: [C, B] each.

    Exponents are at most MAX_EXPONENT. `PACK`: see `bytes_at_once`.
    """
    width: tl.constexpr = byte_CB.shape[1]
    # 2^(exponent - 127), times the 2^126 that a code's bits in a float leave out.
    if dtype == tl.bfloat16 and HAS_PTX:
        factor_CB = spread(((exponent_CG.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True), width)
        low_CB, high_CB = _unpack(byte_CB, _E2M1_2, _E2M1_4, PACK)
        return low_CB * factor_CB, high_CB * factor_CB
    else:
        factor_CB = spread(((exponent_CG.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True), width)
        return _scaled_e2m1(byte_CB, factor_CB, dtype, PACK)


@triton.jit
def unpack_e2m1(byte_CB, scale_CG, dtype: tl.constexpr, PACK: tl.constexpr):
    """Return low and high codes times scales of at most 2, rounded to `dtype`: [C, B] each."""
    factor_CB = spread(scale_CG.to(tl.float32) * _E2M1_FACTOR, byte_CB.shape[1])
    return _scaled_e2m1(byte_CB, factor_CB, dtype, PACK)


@triton.jit
def _scaled_e2m1(byte_CB, factor_CB, dtype: tl.constexpr, PACK: tl.constexpr):
    if dtype == tl.bfloat16 and HAS_PTX:
        low_CB, high_CB = _unpack(byte_CB, _E2M1_2, _E2M1_4, PACK)
        return (low_CB.to(tl.float32) * factor_CB).to(dtype), (high_CB.to(tl.float32) * factor_CB).to(dtype)
    else:
        code_CB = byte_CB.to(tl.int32)
        return (_value(code_CB) * factor_CB).to(dtype), (_value(code_CB >> 4) * factor_CB).to(dtype)


@triton.jit
def unpack_int4(byte_CB, scale_CG, zero_CG, dtype: tl.constexpr, PACK: tl.constexpr):
    """Return low and high codes less their zeros (None: 8), scaled and rounded to `dtype`: [C, B] each.

    `PACK`: see `bytes_at_once`.
    """
    width: tl.constexpr = byte_CB.shape[1]
    if dtype == tl.bfloat16 and HAS_PTX:
        # Codes and zeros are the mantissas of bf16 from 128 on, so a difference of two is exact.
        low_CB, high_CB = _unpack(byte_CB, _INT4_2, _INT4_4, PACK)
        if zero_CG is None:
            low_CB, high_CB = low_CB - _BF16_OF_CODE_0, high_CB - _BF16_OF_CODE_0
        else:
            zero_CB = spread((zero_CG.to(tl.int16) | _BF16_128).to(tl.bfloat16, bitcast=True), width)
            low_CB, high_CB = low_CB - zero_CB, high_CB - zero_CB
        if scale_CG.dtype == tl.bfloat16:
            scale_CB = spread(scale_CG, width)
            return low_CB * scale_CB, high_CB * scale_CB
        else:
            scale_CB = spread(_in_fp32(scale_CG), width)
            return (low_CB.to(tl.float32) * scale_CB).to(dtype), (high_CB.to(tl.float32) * scale_CB).to(dtype)
    else:
        scale_CB = spread(_in_fp32(scale_CG), width)
        code_CB = byte_CB.to(tl.int32)
        if zero_CG is None:
            low_CB, high_CB = (code_CB & 15) - _ZERO, (code_CB >> 4) - _ZERO
        else:
            zero_CB = spread(zero_CG.to(tl.int32), width)
            low_CB, high_CB = (code_CB & 15) - zero_CB, (code_CB >> 4) - zero_CB
        return (low_CB.to(tl.float32) * scale_CB).to(dtype), (high_CB.to(tl.float32) * scale_CB).to(dtype)


@triton.jit
def unpack_int8(byte_CS, scale_CG, dtype: tl.constexpr):
    """Return int8 codes, given as uint8, scaled and rounded to `dtype`."""
    # A code + 128 in the last places of a float: integers are not converted, which is slow.
    if HAS_PTX:
        half_CS = tl.inline_asm_elementwise(
            INT8_PTX, "=r,h", [byte_CS], dtype=tl.float16, is_pure=True, pack=2
        )
        code_CS = (half_CS - 1152.0).to(tl.float32)
    else:
        bits_CS = (byte_CS.to(tl.int32) ^ 0x80) | _FP32_2_TO_23
        code_CS = bits_CS.to(tl.float32, bitcast=True) - 8388736.0
    return (code_CS * spread(_in_fp32(scale_CG), byte_CS.shape[1])).to(dtype)


@triton.jit
def unpack_e4m3(code_CS, scale_CG, dtype: tl.constexpr):
    """Return e4m3 codes, scaled and rounded to `dtype`; uint8 codes where a device does not convert e4m3."""
    if code_CS.dtype == tl.uint8:
        bits_CS = code_CS.to(tl.int16)
        half_CS = (((bits_CS & 0x80) << 8) | ((bits_CS & 0x7F) << 7)).to(tl.float16, bitcast=True)
        factor_CS = spread(_in_fp32(scale_CG) * _E4M3_FACTOR, code_CS.shape[1])
    else:
        half_CS = code_CS.to(tl.float16)
        factor_CS = spread(_in_fp32(scale_CG), code_CS.shape[1])
    return (half_CS.to(tl.float32) * factor_CS).to(dtype)


@triton.jit
def _in_fp32(scale_CG):
    """Return scales in fp32, given as floats, or as the exponents of powers of two."""
    if scale_CG.dtype == tl.uint8:
        return (scale_CG.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scale_CG.to(tl.float32)


@triton.jit
def _unpack(byte_CB, PTX_2: tl.constexpr, PTX_4: tl.constexpr, PACK: tl.constexpr):
    """Return the bf16 of bytes' low and high codes: [C, B] each."""
    if PACK == 4:
        return tl.inline_asm_elementwise(
            PTX_4, "=r,=r,=r,=r,r", [byte_CB], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            PTX_2, "=r,=r,h", [byte_CB], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def split_words(word_BM, dtype: tl.constexpr):
    """Split words of two inputs into the even and the odd inputs."""
    if word_BM.dtype.primitive_bitwidth == 64:
        even_BM, odd_BM = word_BM.to(tl.int32), (word_BM >> 32).to(tl.int32)
    else:
        even_BM, odd_BM = word_BM.to(tl.int16), (word_BM >> 16).to(tl.int16)
    return even_BM.to(dtype, bitcast=True), odd_BM.to(dtype, bitcast=True)


@triton.jit
def split_e4m3(x_SM):
    """Split bf16 into two e4m3 values times powers of two: high and low [S, M], and their scales [M, S / 32].

    A block is 32 values of a column, its scales are exponents as MXFP4's. The parts have the first four and
    the last four of a value's eight significant bits, so they add up to the value exactly if it is at least
    2^-13 of its block's largest, else but for 2^-16 of that. A block with NaN or infinity is NaN.
    """
    STEP: tl.constexpr = x_SM.shape[0]
    HEIGHT: tl.constexpr = x_SM.shape[1]
    BLOCKS: tl.constexpr = STEP // 32
    field_SM = x_SM.to(tl.int16, bitcast=True).to(tl.int32) & 0x7F80
    # The largest exponent; at least so much that no scale's exponent is negative.
    top_GM = tl.maximum(tl.max(tl.reshape(field_SM, (BLOCKS, 32, HEIGHT)), 1) >> 7, 11)
    factor_GM = ((261 - top_GM) << 23).to(tl.float32, bitcast=True)  # the largest becomes 128 to 256
    factor_GJM = tl.broadcast_to(factor_GM[:, None, :], (BLOCKS, 32, HEIGHT))
    scaled_SM = x_SM.to(tl.float32) * tl.reshape(factor_GJM, (STEP, HEIGHT))
    high_SM = (scaled_SM.to(tl.int32, bitcast=True) & _FOUR_BITS).to(tl.float32, bitcast=True)
    low_SM = (scaled_SM - high_SM) * 16.0
    scale_GM = tl.where(top_GM == 255, 255, top_GM - 7)  # 255 is NaN
    scale_MG = tl.trans(scale_GM.to(tl.uint8))
    return high_SM.to(tl.float8e4nv), low_SM.to(tl.float8e4nv), scale_MG, scale_MG - 4


@triton.jit
def _value(code):
    """Return an E2M1 code's value as fp32, divided by 2^126.

    The code's sign, two exponent bits and one mantissa bit are placed in fp32's fields. fp32's exponent bias
    is 127, E2M1's is 1; 0.5 is a subnormal in both.
    """
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def spread(factor_CG, WIDTH: tl.constexpr):
    """Repeat each of a row's factors over its group's part of `WIDTH` bytes."""
    rows: tl.constexpr = factor_CG.shape[0]
    groups: tl.constexpr = factor_CG.shape[1]
    factor_CGJ = tl.broadcast_to(factor_CG[:, :, None], (rows, groups, WIDTH // groups))
    return tl.reshape(factor_CGJ, (rows, WIDTH))
