"""Numba version of `../sampling/gumbel_argmax.py`: argmax and margin of each row, with or without noise.

PyTorch is slow at the argmax of bf16, and needs twenty operators over int64 [rows, vocabulary] to make the
noise. With noise the result is the best two of `selector.py`. Called by `step_ops.py`.

Legend: M rows, V vocabulary.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray

from ...compute.cpu_numba.element_ops import elements, float_of, pointer, size_of
from ...compute.cpu_numba.lane_scans import top_two
from .gumbel_noise import mixed_tokens
from .selector import NOTHING, find_noisy

_FLOAT, _INT, _BOOL = np.float32(0), np.int64(0), np.bool_(0)
# Zeros of integers as wide as an element; the patterns of the infinities.
BITS = {
    torch.bfloat16: (np.int16(0), np.uint16(0), 0x7F80, 0xFF80),
    torch.float32: (np.int32(0), np.uint32(0), 0x7F800000, 0xFF800000),
}


@elements
def are_numbers(logits, found, num_rows, vocab_size, signed, unsigned, infinity, negative_infinity):
    """Find the rows without NaN and +inf; the last four arguments are `BITS` of the logits' dtype.

    Compares bit patterns: among values of one sign, those of infinity and NaN are the largest.
    """
    signed_NV = carray(pointer(logits, signed), (num_rows, vocab_size))
    unsigned_NV = carray(pointer(logits, unsigned), (num_rows, vocab_size))
    found_N = carray(pointer(found, _BOOL), (num_rows,))
    for n in range(num_rows):
        maximum, most_negative = signed, unsigned
        for v in range(vocab_size):
            maximum = max(maximum, signed_NV[n, v])
            most_negative = max(most_negative, unsigned_NV[n, v])
        found_N[n] = maximum < infinity and most_negative <= negative_infinity


@elements
def argmax_margin(logits, ids, margins, num_rows, vocab_size, like):
    ids_N = carray(pointer(ids, _INT), (num_rows,))
    margins_N = carray(pointer(margins, _FLOAT), (num_rows,))
    for n in range(num_rows):
        ids_N[n], margins_N[n] = _argmax_row(logits + n * vocab_size * size_of(like), vocab_size, like)


@elements
def _argmax_row(row, vocab_size, like):
    """Return id and margin of a row: sixteen lanes at a time, then the remaining columns one by one."""
    row_V = carray(pointer(row, like), (vocab_size,))
    place, best, second = top_two(row, vocab_size // 16, like)
    for v in range(vocab_size // 16 * 16, vocab_size):
        value = float_of(row_V[v])
        if value > best:
            place, best, second = v, value, best
        elif value > second:
            second = value
    return place, np.float32(0) if best == second else best - second


@elements
def noisy_argmax_margin(logits, temperature, keys, ids, margins, num_rows, vocab_size, like):
    logits_MV = carray(pointer(logits, like), (num_rows, vocab_size))
    temperature_M = carray(pointer(temperature, _FLOAT), (num_rows,))
    key_2M = carray(pointer(keys, _INT), (2, num_rows))
    ids_M = carray(pointer(ids, _INT), (num_rows,))
    margins_M = carray(pointer(margins, _FLOAT), (num_rows,))
    mixed_V, bound_V = mixed_tokens(vocab_size), np.empty(vocab_size, np.float32)
    score_2, best_2 = np.empty(2, np.float32), np.empty(2, np.int64)
    for m in range(num_rows):
        noise = temperature_M[m], np.uint32(key_2M[0, m]), np.uint32(key_2M[1, m])
        find_noisy(logits_MV[m], mixed_V, noise, NOTHING, score_2, best_2, bound_V)
        ids_M[m] = best_2[0]
        margins_M[m] = np.float32(0) if score_2[0] == score_2[1] else score_2[0] - score_2[1]
