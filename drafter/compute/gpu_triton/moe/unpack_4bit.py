"""Unpacks MXFP4 and INT4 in a kernel's registers; the formats are `compute/checkpoint/packed_4bit.py`'s.

A weight's byte holds two adjacent inputs. They are multiplied separately: low codes with the even inputs of
x, high codes with the odd ones, which share a word of x. So nothing is shuffled, neither at load nor in the
kernel. Called by `grouped_gemm.py`.

Legend: C rows of a weight's tile, B bytes of a step, G = B / 16 blocks of a step, M rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...checkpoint.packed_4bit import ZERO

MAX_EXPONENT = 128  # of an MXFP4 block's scale: 2, so that a code's factor fits in fp32
_BLOCK_BYTES = tl.constexpr(16)
_ZERO = tl.constexpr(ZERO)


@triton.jit
def unpack_mxfp4(byte_CB, exponent_CG, dtype: tl.constexpr):
    """Return low and high codes [C, B] times their blocks' scales (at most MOST_EXPONENT), rounded."""
    # 2^(exponent - 127), times the 2^126 that `_value` leaves out.
    factor_CB = _spread(((exponent_CG.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True))
    code_CB = byte_CB.to(tl.int32)
    low_CB = (_value(code_CB) * factor_CB).to(dtype)
    high_CB = (_value(code_CB >> 4) * factor_CB).to(dtype)
    return low_CB, high_CB


@triton.jit
def unpack_int4(byte_CB, scale_CG, dtype: tl.constexpr):
    """Return low and high codes of packed bytes, scaled and rounded to `dtype`: [C, B] each."""
    scale_CB = _spread(scale_CG.to(tl.float32))
    code_CB = byte_CB.to(tl.int32)
    low_CB = ((code_CB & 15) - _ZERO).to(tl.float32) * scale_CB
    high_CB = ((code_CB >> 4) - _ZERO).to(tl.float32) * scale_CB
    return low_CB.to(dtype), high_CB.to(dtype)


@triton.jit
def split_words(word_BM, dtype: tl.constexpr):
    """Split words of two inputs into the even and the odd inputs."""
    if word_BM.dtype.primitive_bitwidth == 64:
        even_BM, odd_BM = word_BM.to(tl.int32), (word_BM >> 32).to(tl.int32)
    else:
        even_BM, odd_BM = word_BM.to(tl.int16), (word_BM >> 16).to(tl.int16)
    return even_BM.to(dtype, bitcast=True), odd_BM.to(dtype, bitcast=True)


@triton.jit
def _value(code):
    """Return an E2M1 code's value as fp32, divided by 2^126.

    The code's sign, two exponent bits and one mantissa bit are placed in fp32's fields. fp32's exponent bias
    is 127, E2M1's is 1; 0.5 is a subnormal in both.
    """
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _spread(factor_CG):
    """Repeat each of a row's factors over the bytes of its block."""
    rows: tl.constexpr = factor_CG.shape[0]
    blocks: tl.constexpr = factor_CG.shape[1]
    factor_CGJ = tl.broadcast_to(factor_CG[:, :, None], (rows, blocks, _BLOCK_BYTES))
    return tl.reshape(factor_CGJ, (rows, blocks * _BLOCK_BYTES))
