"""Numba version of `../sampling/selector.py`: a row's candidates in one pass over the row, and the walk over
them for all requests in one call.

The best tokens so far are kept sorted. With noise, most scores are never computed: an upper bound without a
logarithm excludes most tokens. Ties go to the lowest ids. In the walk each row is scored after the one token
chosen before it, so with 16 candidates a sixteenth of the definition's pairs is computed. Called by
`step_ops.py`.

Legend: X mask rows, V vocabulary, E rank, R requests, W drafts, K candidates of a row, M rows with
temperature > 0, C tokens of a run.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import numpy as np
from numba import carray

from ...compute.cpu_numba.element_ops import (
    elements,
    float_of,
    pointer,
    size_of,
    sums,
)
from ...compute.cpu_numba.lane_scans import lane_floor, next_reaching
from ..inputs.gumbel_noise import GREATEST_NEGATIVE
from .gumbel_noise import ROUNDING, hash_of, max_gumbel, mixed_tokens, negative_gumbel

_FLOAT, _INT = np.float32(0), np.int64(0)
NOTHING = np.float32(-np.inf)
_CUT = np.float32(GREATEST_NEGATIVE)
_MOST_IF_CUT = ROUNDING - _CUT


@elements
def candidates(logits, of_noise, num_noisy, z, ids, num_rows, vocab_size, top_k, like):
    """Find logits and ids of each row's candidates.

    Args:
        of_noise: addresses of noisy rows, their temperatures, keys and floors; 0 for none.
    """
    noisy, temperature, keys, floors = of_noise
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
    minimum = lane_floor(row, count, like) if len(best_K) <= 16 else NOTHING
    c = next_reaching(row, 0, count, minimum, like)
    while c * 16 < vocab_size:
        for v in range(c * 16, min(c * 16 + 16, vocab_size)):
            value = float_of(row_V[v])
            if value >= minimum:
                num_best = _put_in(value, v, score_K, best_K, num_best)
        c = next_reaching(row, c + 1, count, max(minimum, score_K[-1]), like)


@elements
def find_noisy(row_V, mixed_V, noise, floor, score_K, best_K, bound_V):
    """Find the largest z + T g of a row, with noise = (T, two keys); values below the floor get the least g.

    Tokens with the highest bounds are scored first, so that few of the others remain.
    """
    vocab_size, (scale, key_0, key_1) = len(row_V), noise
    for v in range(vocab_size):
        value, g = float_of(row_V[v]), max_gumbel(hash_of(mixed_V[v], key_0, key_1))
        bound_V[v] = value + scale * (_MOST_IF_CUT if value < floor else g)
    bounds, count, num_best = bound_V.ctypes.data, vocab_size // 16, 0
    score_K[:], best_K[:] = NOTHING, 0
    split = lane_floor(bounds, count, _FLOAT) if len(best_K) <= 16 else NOTHING
    for is_first in (True, False):
        minimum = split if is_first else NOTHING
        c = next_reaching(bounds, 0, count, max(minimum, score_K[-1]), _FLOAT)
        while c * 16 < vocab_size:
            for v in range(c * 16, min(c * 16 + 16, vocab_size)):
                bound = bound_V[v]
                if bound >= max(minimum, score_K[-1]) and (bound >= split) == is_first:
                    value = float_of(row_V[v])
                    negative_g = _CUT if value < floor else negative_gumbel(key_0, key_1, np.uint32(v))
                    num_best = _put_in(value - scale * negative_g, v, score_K, best_K, num_best)
            c = next_reaching(bounds, c + 1, count, max(minimum, score_K[-1]), _FLOAT)


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


@elements
def walk(tensors, of_noise, num_noisy, results, sizes, like_gate, like_codebook):
    """Choose a draft for each mask row, and its margin.

    Args:
        tensors: addresses of logits, ids, gates, both codebooks, the block's tokens and its mask rows.
        of_noise: addresses of noisy rows, temperatures, keys, top-k, top-p, min-p; 0 for none.
        results: addresses of the rows of each request, and of its drafts and margins.
        sizes: R, W, X, K, V, E, rows of the block, rows from an anchor to its request's first mask row.
    """
    z, ids, gates, predecessors, successors, token_ids, sampled = tensors
    noisy, temperatures, keys, top_ks, top_ps, min_ps = of_noise
    counts, drafts, margins = results
    num_requests, width, num_rows, top_k, vocab_size, rank, num_inputs, anchor_distance = sizes
    z_XK = carray(pointer(z, _FLOAT), (num_rows, top_k))
    ids_XK = carray(pointer(ids, _INT), (num_rows, top_k))
    gates_XE = carray(pointer(gates, like_gate), (num_rows, rank))
    predecessor_VE = carray(pointer(predecessors, like_codebook), (vocab_size, rank))
    successor_VE = carray(pointer(successors, like_codebook), (vocab_size, rank))
    token_ids_N = carray(pointer(token_ids, _INT), (num_inputs,))
    sampled_X = carray(pointer(sampled, _INT), (num_rows,))
    noisy_M = carray(pointer(noisy, _INT), (num_noisy,))
    temperature_M = carray(pointer(temperatures, _FLOAT), (num_noisy,))
    key_2M = carray(pointer(keys, _INT), (2, num_noisy))
    top_k_M = carray(pointer(top_ks, _INT), (num_noisy,))
    top_p_M = carray(pointer(top_ps, _FLOAT), (num_noisy,))
    min_p_M = carray(pointer(min_ps, _FLOAT), (num_noisy,))
    counts_R = carray(pointer(counts, _INT), (num_requests,))
    drafts_RW = carray(pointer(drafts, _INT), (num_requests, width))
    margins_RW = carray(pointer(margins, _FLOAT), (num_requests, width))
    score_K, plain_K = np.empty(top_k, np.float32), np.empty(top_k, np.float32)
    gated_E = np.empty(rank, np.float32)
    narrows = top_ks != 0 or top_ps != 0 or min_ps != 0
    x = m = 0
    for r in range(num_requests):
        drafts_RW[r, :], margins_RW[r, :] = -1, np.float32(np.nan)
        before = token_ids_N[sampled_X[x] - anchor_distance] if counts_R[r] else _INT
        for w in range(counts_R[r]):
            _score(z_XK[x], ids_XK[x], predecessor_VE[before], gates_XE[x], successor_VE, gated_E, score_K)
            plain_K[:] = score_K
            if m < num_noisy and noisy_M[m] == x:
                if narrows:
                    _filter(
                        score_K,
                        temperature_M[m],
                        top_k_M[m] if top_ks else 0,
                        top_p_M[m] if top_ps else np.float32(1),
                        min_p_M[m] if min_ps else np.float32(0),
                    )
                key_0, key_1 = np.uint32(key_2M[0, m]), np.uint32(key_2M[1, m])
                for k in range(top_k):
                    score_K[k] -= temperature_M[m] * negative_gumbel(key_0, key_1, np.uint32(ids_XK[x, k]))
                m += 1
            place, margin = _best(score_K)
            if narrows and margin == np.inf:  # only one candidate is kept: use the margin without filters
                margin = _best(plain_K)[1]
            before = ids_XK[x, place]
            drafts_RW[r, w], margins_RW[r, w] = before, margin
            x += 1


@elements
def _score(z_K, ids_K, predecessor_E, gate_E, successor_VE, gated_E, score_K):
    """Score a row's candidates after one token, without noise; NaN becomes -inf and never wins."""
    for e in range(len(gated_E)):
        gated_E[e] = float_of(predecessor_E[e]) * float_of(gate_E[e])
    for k in range(len(z_K)):
        score = z_K[k] + _dot(successor_VE[ids_K[k]], gated_E)
        score_K[k] = score if score == score else NOTHING


@sums
def _dot(row_E, gated_E):
    total = np.float32(0)
    for e in range(len(gated_E)):
        total += float_of(row_E[e]) * gated_E[e]
    return total


@elements
def _best(score_K):
    """Return the first place of the best score, and its margin over the second best."""
    place, best, second = 0, score_K[0], NOTHING
    for k in range(1, len(score_K)):
        if score_K[k] > best:
            place, best, second = k, score_K[k], best
        elif score_K[k] > second:
            second = score_K[k]
    return place, np.float32(0) if best == second else best - second


@elements
def _filter(score_K, temperature, top_k, top_p, min_p):
    """Set candidates that min-p, top-k or top-p cut to -inf, as if the row held no other tokens.

    See `../sampling/top_k_top_p.py`.
    """
    scaled_K = score_K / temperature
    largest = scaled_K.max()
    if min_p > 0:
        _cut_below(score_K, scaled_K, largest + np.log(min_p))
    if 0 < top_k < len(score_K):
        _cut_below(score_K, scaled_K, np.sort(scaled_K)[len(score_K) - top_k])
    if top_p < 1 and largest > NOTHING:
        mass_K = np.exp((scaled_K - largest).astype(np.float64))
        whole, floor = mass_K.sum(), largest
        for k in range(len(score_K)):
            ahead = 0.0
            for j in range(len(score_K)):
                if scaled_K[j] > scaled_K[k]:
                    ahead += mass_K[j]
            if ahead < top_p * whole:
                floor = min(floor, scaled_K[k])
        _cut_below(score_K, scaled_K, floor)


@elements
def _cut_below(score_K, scaled_K, floor):
    for k in range(len(score_K)):
        if scaled_K[k] < floor:
            score_K[k] = scaled_K[k] = NOTHING
