"""MXFP4's codes as numbers, in a kernel's registers: what `drafter/compute/quantization/mxfp4.py` says its
bytes mean.

A weight's byte holds two neighbouring inputs. They are multiplied apart: low codes with the even inputs of x,
high codes with the odd ones, which stand together in one word of x. So nothing is shuffled, neither at load
nor in the kernel. Called by `grouped_gemm.py`.

Legend: C rows of a weight's tile, B bytes of a step, G = B / 16 blocks of a step, M rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_BYTES = tl.constexpr(16)
MOST_EXPONENT = 128  # of a block's scale: 2, so that a code's factor is a number of fp32


@triton.jit
def unpack(byte_CB, exponent_CG, dtype: tl.constexpr):
    """Low and high codes of packed bytes, times their blocks' powers of two, rounded to `dtype`: [C, B] each.

    Exponents are at most MOST_EXPONENT.
    """
    # 2^(exponent - 127), and the 2^126 that `_value` leaves to it.
    factor_CB = spread(((exponent_CG.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True))
    code_CB = byte_CB.to(tl.int32)
    low_CB = (_value(code_CB) * factor_CB).to(dtype)
    high_CB = (_value(code_CB >> 4) * factor_CB).to(dtype)
    return low_CB, high_CB


@triton.jit
def split_words(word_BM, dtype: tl.constexpr):
    """Even and odd inputs out of words that hold one of each."""
    if word_BM.dtype.primitive_bitwidth == 64:
        even_BM, odd_BM = word_BM.to(tl.int32), (word_BM >> 32).to(tl.int32)
    else:
        even_BM, odd_BM = word_BM.to(tl.int16), (word_BM >> 16).to(tl.int16)
    return even_BM.to(dtype, bitcast=True), odd_BM.to(dtype, bitcast=True)


@triton.jit
def _value(code):
    """Of a code's four low bits, sign, two of exponent, one of mantissa: fp32, 2^126 times too small.

    They are put where fp32 has its own: its exponents have a bias of 127, theirs of 1; 0.5 is a subnormal.
    """
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def spread(factor_CG):
    """Each of a row's factors over the bytes of its block."""
    rows: tl.constexpr = factor_CG.shape[0]
    blocks: tl.constexpr = factor_CG.shape[1]
    factor_CGJ = tl.broadcast_to(factor_CG[:, :, None], (rows, blocks, BLOCK_BYTES))
    return tl.reshape(factor_CGJ, (rows, blocks * BLOCK_BYTES))
