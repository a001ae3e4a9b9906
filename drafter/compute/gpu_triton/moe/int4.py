"""Unpacks INT4 in a kernel's registers; the format is `drafter/compute/quantization/int4.py`'s.

Bytes have MXFP4's layout, so the GEMM is the same (`grouped_gemm.py`, which calls this).

Legend: C rows of a weight's tile, B bytes of a step, G = B / 16 groups of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quantization.int4 import ZERO
from .mxfp4 import spread

_ZERO = tl.constexpr(ZERO)


@triton.jit
def unpack_integers(byte_CB, scale_CG, dtype: tl.constexpr):
    """Return low and high codes of packed bytes, scaled and rounded to `dtype`: [C, B] each."""
    scale_CB = spread(scale_CG.to(tl.float32))
    code_CB = byte_CB.to(tl.int32)
    low_CB = ((code_CB & 15) - _ZERO).to(tl.float32) * scale_CB
    high_CB = ((code_CB >> 4) - _ZERO).to(tl.float32) * scale_CB
    return low_CB.to(dtype), high_CB.to(dtype)
