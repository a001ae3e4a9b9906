"""Triton version of `drafter/step/inputs/gumbel_noise.py`: the same integers, and precise logarithms.

A GPU's fast logarithm is imprecise near 1, where the winning noise lies; so log is a polynomial, within about
one unit in the last place everywhere. Used by `sampler.py` and `top_k_top_p.py`.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ...inputs.gumbel_noise import CHAINS, FACTOR_1, FACTOR_2

_FACTOR_A, _FACTOR_B = tl.constexpr(FACTOR_1), tl.constexpr(FACTOR_2)
_CHAIN_0, _CHAIN_1 = tl.constexpr(CHAINS[0]), tl.constexpr(CHAINS[1])


@triton.jit
def noise_keys(seed, position):
    """Return the two 32-bit keys of a row; unsigned products wrap to the definition's low bits."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position = position.to(tl.uint32)
    key_0 = _mix(_mix(_mix(low ^ _CHAIN_0) ^ high) ^ position)
    key_1 = _mix(_mix(_mix(low ^ _CHAIN_1) ^ high) ^ position)
    return key_0, key_1


@triton.jit
def negative_gumbel(key_0, key_1, tokens):
    """Return log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32, as the definition's `negative_gumbel`."""
    bits = _mix(tokens.to(tl.uint32)) ^ key_0
    bits = bits * _FACTOR_A
    bits = bits ^ (bits >> 15) ^ key_1
    bits = bits * _FACTOR_B
    bits = bits ^ (bits >> 15)
    minus_u = bits.to(tl.float32) * -(2.0**-32) - 2.0**-33
    minus_u = tl.maximum(minus_u, -1.0 + 2.0**-24)
    return log(-_log1p(minus_u))


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * _FACTOR_A
    x = x ^ (x >> 15)
    x = x * _FACTOR_B
    return x ^ (x >> 15)


@triton.jit
def log(x):
    """Return the natural logarithm of normal positive fp32 numbers."""
    fraction, exponent = _split(x)
    return _log_near_one(fraction - 1.0, exponent)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for -1 < x <= 0, as precise near 0 as x itself."""
    fraction, exponent = _split(1.0 + x)
    return _log_near_one(tl.where(exponent == 0, x, fraction - 1.0), exponent)


@triton.jit
def _split(x):
    """Split x = fraction * 2^exponent, with sqrt(1/2) <= fraction < sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True), exponent


@triton.jit
def _log_near_one(f, exponent):
    """Return log(1 + f) + exponent * log(2), with the polynomial of Cephes' logf and log(2) in two parts."""
    p = 7.0376836292e-2
    p = p * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    e = exponent.to(tl.float32)
    rest = p * f * square - 2.12194440e-4 * e - 0.5 * square
    return f + rest + 0.693359375 * e
