"""Numba version of `../inputs/gumbel_noise.py`: the same integers, with polynomial logarithms.

The logarithms are precise to about one unit in the last place, as on a GPU
(`step/gpu_triton/sampling/sampling_metadata.py`). Used by `gumbel_argmax.py` and
`selector.py`.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import numpy as np
from numba.extending import intrinsic

from ...compute.cpu_numba.element_ops import elements, inlined
from ..inputs.gumbel_noise import FACTOR_1, FACTOR_2

_FACTOR_A, _FACTOR_B, _SHIFT = np.uint32(FACTOR_1), np.uint32(FACTOR_2), np.uint32(15)
ROUNDING = np.float32(1e-4)  # bound on the rounding error of an upper bound of g


@elements
def mixed_tokens(vocab_size):
    """Return the row-independent part of the hash, uint32 [V]."""
    mixed_V = np.empty(vocab_size, np.uint32)
    for v in range(vocab_size):
        mixed_V[v] = _mix(np.uint32(v))
    return mixed_V


@inlined
def max_gumbel(bits):
    """Return an upper bound of g for these bits, without a logarithm.

    With u = 2^e (1 + f): g <= -log(u) <= -log(2) (e + f), plus `ROUNDING`.
    """
    u = np.float32(bits) * np.float32(2.0**-32) + np.float32(2.0**-33)
    log2_u = np.float32(np.float32(u).view(np.int32)) * np.float32(2.0**-23) - np.float32(127)
    return ROUNDING - np.float32(0.6931471805) * log2_u


@inlined
def negative_gumbel(key_0, key_1, token):
    """Return log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32.

    32-bit products wrap to the same low bits as the definition's 64-bit ones.
    """
    bits = hash_of(_mix(token), key_0, key_1)
    minus_u = np.float32(bits) * np.float32(-(2.0**-32)) - np.float32(2.0**-33)
    minus_u = max(minus_u, np.float32(-1.0 + 2.0**-24))
    return _log(-_log1p(minus_u))


@inlined
def hash_of(mixed, key_0, key_1):
    """Return the 32 random bits of a token from its mixed id and the row's keys."""
    bits = _times(_xor(mixed, key_0), _FACTOR_A)
    bits = _times(_xor(_fold(bits, _SHIFT), key_1), _FACTOR_B)
    return _fold(bits, _SHIFT)


@inlined
def _mix(x):
    x = _times(_fold(x, np.uint32(16)), _FACTOR_A)
    x = _times(_fold(x, _SHIFT), _FACTOR_B)
    return _fold(x, _SHIFT)


# Numba widens integers to 64 bits, which halves the SIMD lanes; so these intrinsics emit 32-bit operations.


@intrinsic
def _times(context, x, factor):
    return x(x, factor), lambda context, builder, signature, args: builder.mul(*args)


@intrinsic
def _xor(context, x, y):
    return x(x, y), lambda context, builder, signature, args: builder.xor(*args)


@intrinsic
def _fold(context, x, shift):
    def generate(context, builder, signature, args):
        return builder.xor(args[0], builder.lshr(*args))

    return x(x, shift), generate


@inlined
def _log(x):
    """Return the natural logarithm of a normal positive fp32 number."""
    exponent = _exponent(x)
    return _log_near_one(_fraction(x, exponent) - np.float32(1), exponent)


@inlined
def _log1p(x):
    """Return log(1 + x) for -1 < x <= 0, as precise near 0 as x itself."""
    exponent = _exponent(np.float32(1) + x)
    f = _fraction(np.float32(1) + x, exponent) - np.float32(1)
    return _log_near_one(x if exponent == 0 else f, exponent)


@inlined
def _exponent(x):
    """Return e of x = fraction * 2^e, with sqrt(1/2) <= fraction < sqrt(2)."""
    return np.int32(np.int32(np.float32(x).view(np.int32) - np.int32(0x3F3504F3)) >> np.int32(23))


@inlined
def _fraction(x, exponent):
    return np.int32(np.float32(x).view(np.int32) - np.int32(exponent << np.int32(23))).view(np.float32)


@inlined
def _log_near_one(f, exponent):
    """Return log(1 + f) + exponent * log(2), with the polynomial of Cephes' logf and log(2) in two parts."""
    p = np.float32(7.0376836292e-2)
    p = p * f - np.float32(1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f - np.float32(1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f - np.float32(1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f - np.float32(2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    square, e = f * f, np.float32(exponent)
    rest = p * f * square - np.float32(2.12194440e-4) * e - np.float32(0.5) * square
    return f + rest + np.float32(0.693359375) * e
