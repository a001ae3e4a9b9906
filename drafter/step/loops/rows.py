"""Where a step's rows stand, and which tokens they carry: integers, in one compiled call each.

NumPy takes a microsecond or more per operation, and a step of one request wants dozens of them. The layouts
are made on the host whatever computes the step; tokens are moved here where they live in the host's memory.
Called by `states.py` and `verification.py`.

Legend: N rows, X rows a token is wanted of, R requests, B requests that draft, K most drafts, W = K + 1, S
slots, P pages of a request, T tokens.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ...compute.loops.elements import elements, pointer

_INT64 = np.int64(0)


@elements
def lay_out(slots_R, first_R, rows_R, counts_R, page_table_SP, page_size):
    """Rows, request after request.

    Args:
        first_R: absolute position of each request's first row.
        counts_R: how many of its last rows a token is wanted of.

    Returns:
        positions_N, kv_slots_N; wanted_X (which rows), slots_X (of the requests). int64.
    """
    num_rows, num_wanted = rows_R.sum(), counts_R.sum()
    positions_N = np.empty(num_rows, dtype=np.int64)
    kv_slots_N = np.empty(num_rows, dtype=np.int64)
    wanted_X = np.empty(num_wanted, dtype=np.int64)
    slots_X = np.empty(num_wanted, dtype=np.int64)
    n = x = 0
    for r in range(len(slots_R)):
        unwanted = rows_R[r] - counts_R[r]
        for i in range(rows_R[r]):
            position = first_R[r] + i
            page, offset = position // page_size, position % page_size
            positions_N[n] = position
            kv_slots_N[n] = page_table_SP[slots_R[r], page] * page_size + offset
            if i >= unwanted:
                wanted_X[x], slots_X[x] = n, slots_R[r]
                x += 1
            n += 1
    return positions_N, kv_slots_N, wanted_X, slots_X


@elements
def lay_out_tokens(tokens_ST, slots_R, first_R, rows_R, counts_R, page_table_SP, page_size):
    """The rows' tokens [N], then the same."""
    positions_N, kv_slots_N, wanted_X, slots_X = lay_out(
        slots_R, first_R, rows_R, counts_R, page_table_SP, page_size
    )
    token_ids_N = np.empty(len(positions_N), dtype=np.int64)
    n = 0
    for r in range(len(slots_R)):
        for _ in range(rows_R[r]):
            token_ids_N[n] = tokens_ST[slots_R[r], positions_N[n]]
            n += 1
    return token_ids_N, positions_N, kv_slots_N, wanted_X, slots_X


@elements
def places(who_B, drafts_B, max_drafts):
    """Place of every proposal [X] in the flattened [R, K]; `who` are the requests of the plan that draft."""
    places_X = np.empty(drafts_B.sum(), dtype=np.int64)
    x = 0
    for b in range(len(who_B)):
        for i in range(drafts_B[b]):
            places_X[x] = who_B[b] * max_drafts + i
            x += 1
    return places_X


def accept(sampled_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """See `verification.accept`; all in the host's memory, contiguous."""
    assert sampled_X.dtype == counts_R.dtype == drafts_RK.dtype == torch.int64, "read by address"
    num_requests, num_drafts = drafts_RK.shape
    token_ids_RW = torch.empty(num_requests, num_drafts + 1, dtype=torch.int64)
    num_tokens_R = torch.empty(num_requests, dtype=torch.int64)
    _accept(
        sampled_X.data_ptr(),
        counts_R.data_ptr(),
        drafts_RK.data_ptr(),
        token_ids_RW.data_ptr(),
        num_tokens_R.data_ptr(),
        num_requests,
        num_drafts,
    )
    return token_ids_RW, num_tokens_R


@elements
def _accept(sampled, counts, drafts, token_ids, num_tokens, num_requests, num_drafts):
    counts_R = carray(pointer(counts, _INT64), (num_requests,))
    sampled_X = carray(pointer(sampled, _INT64), (counts_R.sum(),))
    drafts_RK = carray(pointer(drafts, _INT64), (num_requests, num_drafts))
    token_ids_RW = carray(pointer(token_ids, _INT64), (num_requests, num_drafts + 1))
    num_tokens_R = carray(pointer(num_tokens, _INT64), (num_requests,))
    token_ids_RW[:] = -1
    begin = 0
    for r in range(num_requests):
        num_tokens_R[r] = 0
        for i in range(counts_R[r]):
            token_ids_RW[r, i] = sampled_X[begin + i]
            num_tokens_R[r] += 1
            if i == num_drafts or drafts_RK[r, i] != sampled_X[begin + i]:
                break
        begin += counts_R[r]


@elements
def write_tokens(tokens_ST, slots_R, first_R, counts_R, values_RW):
    """Write the first `counts` values of each request from position `first` on, but for negative ones."""
    for r in range(len(slots_R)):
        for i in range(counts_R[r]):
            if values_RW[r, i] >= 0:
                tokens_ST[slots_R[r], first_R[r] + i] = values_RW[r, i]
