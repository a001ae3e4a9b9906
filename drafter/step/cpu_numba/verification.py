"""Numba version of `../sampling/verification.py`: accepts drafts, and counts those that are verified.

Worths equal the definition's to a few units in the last place.

Legend: X sampled rows, R requests, K most drafts of a request, W = K + 1, N rows of the target's pass, S
drafts of all requests.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ....cluster.speculation.draft_trimming import MAX_MARGIN
from ...compute.cpu_numba.element_ops import elements, pointer

_INT64, _ONE = np.int64(0), np.float32(1)


@elements
def accept(sampled, counts, drafts, token_ids, num_tokens, num_requests, num_drafts):
    counts_R = carray(pointer(counts, _INT64), (num_requests,))
    chosen_X = carray(pointer(sampled, _INT64), (counts_R.sum(),))
    drafts_RK = carray(pointer(drafts, _INT64), (num_requests, num_drafts))
    token_ids_RW = carray(pointer(token_ids, _INT64), (num_requests, num_drafts + 1))
    num_tokens_R = carray(pointer(num_tokens, _INT64), (num_requests,))
    token_ids_RW[:] = -1
    begin = 0
    for r in range(num_requests):
        num_tokens_R[r] = 0
        for i in range(counts_R[r]):
            token_ids_RW[r, i] = chosen_X[begin + i]
            num_tokens_R[r] += 1
            if i == num_drafts or drafts_RK[r, i] != chosen_X[begin + i]:
                break
        begin += counts_R[r]


@elements
def trim(
    margins_RK, num_drafts_R, num_rows_R, bias_R, bias_K, slope_K, weights_R, seconds_N, num_rows, rate
):  # fmt: skip
    num_requests, num_drafts = len(num_drafts_R), num_drafts_R.sum()
    num_other_rows = num_rows_R.sum() - num_drafts
    worth_S, request_S = np.empty(num_drafts, dtype=np.float32), np.empty(num_drafts, dtype=np.int32)
    s = 0
    for r in range(num_requests):
        survival = _ONE
        for k in range(num_drafts_R[r]):
            survival *= _chance(margins_RK[r, k], bias_R[r] + bias_K[k], slope_K[k])
            worth_S[s], request_S[s] = -weights_R[r] * survival, r
            s += 1
    order_S = np.argsort(worth_S, kind="mergesort")  # stable: among equals the first request's come first
    count = min(max(num_rows - num_other_rows, 0), num_drafts)
    if num_rows < 0:
        count, worth, best = 0, weights_R.sum(), np.float32(-np.inf)
        for s in range(num_drafts + 1):
            seconds = seconds_N[num_other_rows + s]
            value = worth - rate * seconds if rate > 0 else worth / seconds
            if value > best:
                best, count = value, s
            if s < num_drafts:
                worth -= worth_S[order_S[s]]
    verified_R = np.zeros(num_requests, dtype=np.int32)
    for s in range(count):
        verified_R[request_S[order_S[s]]] += 1
    return verified_R


@elements
def _chance(margin, bias, slope):
    """Return the probability that a draft is accepted if those before it are."""
    if np.isnan(margin):
        return np.float32(0)
    return _ONE / (_ONE + np.exp(-(bias + slope * np.log(_ONE + min(margin, MAX_MARGIN)))))
