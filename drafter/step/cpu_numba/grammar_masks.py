"""Numba version of `../sampling/grammar_masks.py`: applies token bitmasks to logits.

Legend: N rows, V vocabulary, M rows with a mask, W words of a mask.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ...compute.cpu_numba.element_ops import elements, float_of, pointer, rounded, size_of

_INT32, _INT64 = np.int32(0), np.int64(0)
_NOTHING = np.float32(-np.inf)


@elements
def mask_tokens(logits, rows, bits, end_id, num_rows, vocab_size, num_words, like):
    rows_M = carray(pointer(rows, _INT64), (num_rows,))
    bits_MW = carray(pointer(bits, _INT32), (num_rows, num_words))
    for m in range(num_rows):
        row_V = carray(pointer(logits + rows_M[m] * vocab_size * size_of(like), like), (vocab_size,))
        is_empty = True
        for w in range(num_words):  # most words are all zeros or all ones
            word, begin, end = bits_MW[m, w], 32 * w, min(32 * (w + 1), vocab_size)
            if word == 0:
                for v in range(begin, end):
                    row_V[v] = rounded(_NOTHING, like)
            elif word != -1 or is_empty:
                for v in range(begin, end):
                    if (word >> np.int32(v - begin)) & 1 == 0:
                        row_V[v] = rounded(_NOTHING, like)
                    elif float_of(row_V[v]) != _NOTHING:
                        is_empty = False
        if is_empty:
            row_V[end_id] = rounded(np.float32(0), like)
