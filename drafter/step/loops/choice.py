"""The choice of a token per row and its margin, as `../choice.py` means them, in one loop.

PyTorch finds the largest of bf16 values slowly, and makes that noise in twenty operators over [rows,
vocabulary] of int64. The integers here are the same; the logarithms are polynomials of our own, within about
one unit in the last place, as on a GPU (`device/noise.py`). Called by `sampling.py`; `candidates.py` takes
the noise.

Legend: M rows, V vocabulary.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from numba.extending import intrinsic
from torch import Tensor

from ...compute.loops.elements import LIKE, elements, float_of, inlined, pointer, size_of, top_two_of
from ..noise import FACTOR_1, FACTOR_2

_FACTOR_A, _FACTOR_B, _SHIFT = np.uint32(FACTOR_1), np.uint32(FACTOR_2), np.uint32(15)
_FLOAT, _INT = np.float32(0), np.int64(0)


def argmax_margin(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Of fp32 or bf16."""
    logits_NV = logits_NV.contiguous()
    num_rows, vocab_size = logits_NV.shape
    ids_N, margins_N = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    _argmax(
        logits_NV.data_ptr(),
        ids_N.data_ptr(),
        margins_N.data_ptr(),
        num_rows,
        vocab_size,
        LIKE[logits_NV.dtype],
    )
    return ids_N, margins_N


def noisy_argmax_margin(logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor) -> tuple[Tensor, Tensor]:
    """Of fp32 or bf16."""
    logits_MV = logits_MV.contiguous()
    num_rows, vocab_size = logits_MV.shape
    ids_M, margins_M = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    _noisy_argmax(
        logits_MV.data_ptr(),
        temperature_M1.data_ptr(),
        key_2M1.data_ptr(),
        ids_M.data_ptr(),
        margins_M.data_ptr(),
        num_rows,
        vocab_size,
        LIKE[logits_MV.dtype],
    )
    return ids_M, margins_M


@elements
def _argmax(logits, ids, margins, num_rows, vocab_size, like):
    ids_N = carray(pointer(ids, _INT), (num_rows,))
    margins_N = carray(pointer(margins, _FLOAT), (num_rows,))
    for n in range(num_rows):
        ids_N[n], margins_N[n] = _argmax_row(logits + n * vocab_size * size_of(like), vocab_size, like)


@elements
def _argmax_scores(score_V):
    """Of an array, which its caller keeps."""
    return _argmax_row(score_V.ctypes.data, len(score_V), _FLOAT)


@elements
def _argmax_row(row, vocab_size, like):
    """Sixteen at a time, then the rest one by one."""
    row_V = carray(pointer(row, like), (vocab_size,))
    place, best, second = top_two_of(row, vocab_size // 16, like)
    for v in range(vocab_size // 16 * 16, vocab_size):
        value = float_of(row_V[v])
        if value > best:
            place, best, second = v, value, best
        elif value > second:
            second = value
    return place, np.float32(0) if best == second else best - second


@elements
def _noisy_argmax(logits, temperature, keys, ids, margins, num_rows, vocab_size, like):
    logits_MV = carray(pointer(logits, like), (num_rows, vocab_size))
    temperature_M = carray(pointer(temperature, _FLOAT), (num_rows,))
    key_2M = carray(pointer(keys, _INT), (2, num_rows))
    ids_M = carray(pointer(ids, _INT), (num_rows,))
    margins_M = carray(pointer(margins, _FLOAT), (num_rows,))
    score_V = np.empty(vocab_size, dtype=np.float32)
    for m in range(num_rows):
        key_0, key_1, scale = np.uint32(key_2M[0, m]), np.uint32(key_2M[1, m]), temperature_M[m]
        for v in range(vocab_size):
            score_V[v] = float_of(logits_MV[m, v]) - scale * negative_gumbel(key_0, key_1, np.uint32(v))
        ids_M[m], margins_M[m] = _argmax_scores(score_V)


@inlined
def negative_gumbel(key_0, key_1, token):
    """log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32; 32-bit products wrap to the same low bits."""
    bits = hash_of(mix(token), key_0, key_1)
    minus_u = np.float32(bits) * np.float32(-(2.0**-32)) - np.float32(2.0**-33)
    minus_u = max(minus_u, np.float32(-1.0 + 2.0**-24))
    return _log(-_log1p(minus_u))


@inlined
def hash_of(mixed, key_0, key_1):
    """A token's 32 random bits, of the token mixed and a row's keys."""
    bits = _times(_xor(mixed, key_0), _FACTOR_A)
    bits = _times(_xor(_fold(bits, _SHIFT), key_1), _FACTOR_B)
    return _fold(bits, _SHIFT)


@inlined
def mix(x):
    x = _times(_fold(x, np.uint32(16)), _FACTOR_A)
    x = _times(_fold(x, _SHIFT), _FACTOR_B)
    return _fold(x, _SHIFT)


# Numba widens integers to 64 bits before it computes, at half the lanes: so the operations themselves.


@intrinsic
def _times(context, x, factor):
    """x * factor mod 2^32."""
    return x(x, factor), lambda context, builder, signature, args: builder.mul(*args)


@intrinsic
def _xor(context, x, y):
    return x(x, y), lambda context, builder, signature, args: builder.xor(*args)


@intrinsic
def _fold(context, x, shift):
    """x ^ (x >> shift)."""

    def generate(context, builder, signature, args):
        return builder.xor(args[0], builder.lshr(*args))

    return x(x, shift), generate


@inlined
def _log(x):
    """Natural logarithm of normal positive fp32 numbers."""
    exponent = _exponent(x)
    return _log_near_one(_fraction(x, exponent) - np.float32(1), exponent)


@inlined
def _log1p(x):
    """log(1 + x) for -1 < x <= 0, as precise near 0 as x itself."""
    exponent = _exponent(np.float32(1) + x)
    f = _fraction(np.float32(1) + x, exponent) - np.float32(1)
    return _log_near_one(x if exponent == 0 else f, exponent)


@inlined
def _exponent(x):
    """e of x = fraction * 2^e, with sqrt(1/2) <= fraction < sqrt(2)."""
    return np.int32(np.int32(np.float32(x).view(np.int32) - np.int32(0x3F3504F3)) >> np.int32(23))


@inlined
def _fraction(x, exponent):
    return np.int32(np.float32(x).view(np.int32) - np.int32(exponent << np.int32(23))).view(np.float32)


@inlined
def _log_near_one(f, exponent):
    """log(1 + f) + exponent * log(2): the polynomial of Cephes' logf, log(2) in two parts."""
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
