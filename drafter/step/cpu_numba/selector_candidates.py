"""Numba version of `../sampling/selector_candidates.py`: a row's candidates, in one pass over the row.

The best tokens so far are kept sorted. With noise, most scores are never computed: an upper bound without a
logarithm excludes most tokens. Ties go to the lowest ids. Called by `selector.py`.

Legend: X rows, V vocabulary, K candidates of a row, M rows with temperature > 0, C tokens of a run.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ...compute.cpu_numba.element_ops import LIKE, elements, float_of, pointer, size_of
from ...compute.cpu_numba.lane_scans import lane_floor, next_reaching
from ..inputs.gumbel_noise import GREATEST_NEGATIVE
from ..inputs.sampling_metadata import SamplingMetadata
from ..sampling.top_k_top_p import floors
from .gumbel_noise import ROUNDING, hash_of, mixed_tokens, most_gumbel, negative_gumbel

_FLOAT, _INT = np.float32(0), np.int64(0)
NOTHING = np.float32(-np.inf)
_CUT = np.float32(GREATEST_NEGATIVE)
_MOST_IF_CUT = ROUNDING - _CUT


def candidates(logits_XV: Tensor, batch: SamplingMetadata, top_k: int) -> tuple[Tensor, Tensor]:
    """Return logits (fp32) and ids (int64) [X, K] of each row's candidates from fp32 or bf16 logits."""
    logits_XV = logits_XV.contiguous()
    num_rows, vocab_size = logits_XV.shape
    assert top_k <= vocab_size, "as many candidates as there are tokens"
    z_XK, ids_XK = torch.empty(num_rows, top_k), torch.empty(num_rows, top_k, dtype=torch.int64)
    noisy_M, temperature_M1, key_2M1 = batch.noisy_M, batch.temperature_M1, batch.key_2M1
    floor_M1 = None
    if noisy_M is not None and batch.narrows:
        floor_M1 = floors(logits_XV.index_select(0, noisy_M), batch)
    _candidates(
        logits_XV.data_ptr(),
        *(0 if x is None else x.data_ptr() for x in (noisy_M, temperature_M1, key_2M1, floor_M1)),
        0 if noisy_M is None else len(noisy_M),
        z_XK.data_ptr(),
        ids_XK.data_ptr(),
        num_rows,
        vocab_size,
        top_k,
        LIKE[logits_XV.dtype],
    )
    return z_XK, ids_XK


@elements
def _candidates(
    logits, noisy, temperature, keys, floors, num_noisy, z, ids, num_rows, vocab_size, top_k, like
):  # fmt: skip
    noisy_M = carray(pointer(noisy, _INT), (num_noisy,))
    temperature_M = carray(pointer(temperature, _FLOAT), (num_noisy,))
    floor_M = carray(pointer(floors, _FLOAT), (num_noisy,))
    key_2M = carray(pointer(keys, _INT), (2, num_noisy))
    z_XK = carray(pointer(z, _FLOAT), (num_rows, top_k))
    ids_XK = carray(pointer(ids, _INT), (num_rows, top_k))
    score_K, bound_V, mixed_V = np.empty(top_k, np.float32), np.empty(0, np.float32), np.empty(0, np.uint32)
    if num_noisy:
        bound_V, mixed_V = np.empty(vocab_size, np.float32), mixed_tokens(vocab_size)
    m = 0
    for x in range(num_rows):
        row = logits + x * vocab_size * size_of(like)
        row_V, best_K = carray(pointer(row, like), (vocab_size,)), ids_XK[x]
        if m < num_noisy and noisy_M[m] == x:
            noise = temperature_M[m], np.uint32(key_2M[0, m]), np.uint32(key_2M[1, m])
            find_noisy(row_V, mixed_V, noise, floor_M[m] if floors else NOTHING, score_K, best_K, bound_V)
            m += 1
        else:
            _find(row, row_V, like, score_K, best_K)
        best_K.sort()
        for k in range(top_k):
            z_XK[x, k] = float_of(row_V[best_K[k]])


@elements
def _find(row, row_V, like, score_K, best_K):
    """Find the largest values of a row and their ids, best first."""
    vocab_size, num_best = len(row_V), 0
    count = vocab_size // 16
    score_K[:], best_K[:] = NOTHING, 0
    least = lane_floor(row, count, like) if len(best_K) <= 16 else NOTHING
    c = next_reaching(row, 0, count, least, like)
    while c * 16 < vocab_size:
        for v in range(c * 16, min(c * 16 + 16, vocab_size)):
            value = float_of(row_V[v])
            if value >= least:
                num_best = _put_in(value, v, score_K, best_K, num_best)
        c = next_reaching(row, c + 1, count, max(least, score_K[-1]), like)


@elements
def find_noisy(row_V, mixed_V, noise, floor, score_K, best_K, bound_V):
    """Find the largest z + T g of a row, with noise = (T, two keys); values below the floor get the least g.

    Tokens with the highest bounds are scored first, so that few of the others remain.
    """
    vocab_size, (scale, key_0, key_1) = len(row_V), noise
    for v in range(vocab_size):
        value, g = float_of(row_V[v]), most_gumbel(hash_of(mixed_V[v], key_0, key_1))
        bound_V[v] = value + scale * (_MOST_IF_CUT if value < floor else g)
    bounds, count, num_best = bound_V.ctypes.data, vocab_size // 16, 0
    score_K[:], best_K[:] = NOTHING, 0
    split = lane_floor(bounds, count, _FLOAT) if len(best_K) <= 16 else NOTHING
    for is_first in (True, False):
        least = split if is_first else NOTHING
        c = next_reaching(bounds, 0, count, max(least, score_K[-1]), _FLOAT)
        while c * 16 < vocab_size:
            for v in range(c * 16, min(c * 16 + 16, vocab_size)):
                bound = bound_V[v]
                if bound >= max(least, score_K[-1]) and (bound >= split) == is_first:
                    value = float_of(row_V[v])
                    negative_g = _CUT if value < floor else negative_gumbel(key_0, key_1, np.uint32(v))
                    num_best = _put_in(value - scale * negative_g, v, score_K, best_K, num_best)
            c = next_reaching(bounds, c + 1, count, max(least, score_K[-1]), _FLOAT)


@elements
def _put_in(score, token, score_K, best_K, num_best):
    """Insert by score (descending), then id, dropping the last if full; return the new length."""
    k = len(best_K) - 1
    if num_best < len(best_K):
        k = num_best
    elif score < score_K[k] or (score == score_K[k] and token > best_K[k]):
        return num_best
    while k > 0 and (score > score_K[k - 1] or (score == score_K[k - 1] and token < best_K[k - 1])):
        score_K[k], best_K[k] = score_K[k - 1], best_K[k - 1]
        k -= 1
    score_K[k], best_K[k] = score, token
    return min(num_best + 1, len(best_K))
