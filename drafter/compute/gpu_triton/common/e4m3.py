"""Conversions between e4m3 (float8_e4m3fn) and wider types in kernels, for weights and K/V."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...memory.kv_cache import E4M3_MAX

_MAX = tl.constexpr(E4M3_MAX)
_FIRST_NORMAL_BITS = tl.constexpr(121 << 23)  # 2^-6 in fp32, the smallest normal number of e4m3
_ALIGNING_BITS = tl.constexpr(141 << 23)  # 2^14: a sum with it has a last place of 2^-9, as subnormals
_REBIAS = tl.constexpr((120 << 23) - 0x7FFFF)  # of exponents, less half a last place for rounding
_HAS_PTX = tl.constexpr(not os.environ.get("TRITON_INTERPRET") and torch.version.hip is None)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Convert e4m3 values, all exactly; values of another type are only cast to `dtype`.

    On their way to bf16 they pass through fp16 and fp32: the direct way is a conversion instruction for each
    value, of which a multiprocessor issues an eighth as many as of others.
    """
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def widen_once(x, dtype: tl.constexpr):
    """Convert a tile for two products as `widen` does, once, after an asynchronous copy.

    The compiler would move the conversion to each product, and then not copy asynchronously, because
    the operands' layouts differ. It does not move assembly with side effects, which here does nothing.
    """
    wide = widen(x, dtype)
    if x.dtype == tl.float8e4nv and wide.dtype.primitive_bitwidth == 16 and _HAS_PTX:
        nothing: tl.constexpr = "mov.b32 $0, $1;"
        wide = tl.inline_asm_elementwise(nothing, "=r,r", [wide], dtype=wide.dtype, is_pure=False, pack=2)
    return wide


@triton.jit
def as_stored(x, dtype: tl.constexpr, scale=None):
    """Convert values for K/V of `dtype` as `PagedKVCache.write` does, bit by bit.

    NaNs and infinities become 0: attention multiplies values that a row does not see by zero, among them
    those of later drafts, of padding and of other requests. In e4m3 `scale`, if given, divides values, those
    beyond the largest are clamped and ties go to even codes; in integers, because compilers, devices and the
    interpreter round differently.
    """
    x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)
    if dtype == tl.float8e4nv:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        positive = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        if scale is not None:
            positive = tl.math.div_rn(positive, scale)
        positive = tl.minimum(positive, _MAX)
        magnitude = positive.to(tl.int32, bitcast=True)
        aligned = positive + 16384.0
        subnormal = aligned.to(tl.int32, bitcast=True) - _ALIGNING_BITS
        normal = (magnitude - _REBIAS + ((magnitude >> 20) & 1)) >> 20
        codes = tl.where(magnitude < _FIRST_NORMAL_BITS, subnormal, normal) | sign
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(dtype)
