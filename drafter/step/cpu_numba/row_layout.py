"""Numba version of `../inputs/row_layout.py`: positions, K/V slots and tokens of a step's rows.

Called by `step_ops.py`.

Legend: N rows, X sampled rows, R requests, W values of a request, S slots, P pages of a request, T tokens, G
page groups.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ...compute.cpu_numba.element_ops import elements, pointer

_INT64 = np.int64(0)


@elements
def lay_out_rows(tokens_ST, slots_R, first_R, num_rows_R, counts_R, page_tables_GSP, page_size):
    num_rows, num_sampled = num_rows_R.sum(), counts_R.sum()
    token_ids_N = np.empty(num_rows, dtype=np.int64)
    positions_N = np.empty(num_rows, dtype=np.int64)
    num_groups = len(page_tables_GSP)
    kv_slots_GN = np.empty((num_groups, num_rows), dtype=np.int64)
    sampled_X = np.empty(num_sampled, dtype=np.int64)
    slots_X = np.empty(num_sampled, dtype=np.int64)
    n = x = 0
    for r in range(len(slots_R)):
        slot, unsampled = slots_R[r], num_rows_R[r] - counts_R[r]
        for i in range(num_rows_R[r]):
            position = first_R[r] + i
            page, offset = position // page_size, position % page_size
            token_ids_N[n] = tokens_ST[slot, position]
            positions_N[n] = position
            for g in range(num_groups):
                kv_slots_GN[g, n] = page_tables_GSP[g, slot, page] * page_size + offset
            if i >= unsampled:
                sampled_X[x], slots_X[x] = n, slot
                x += 1
            n += 1
    return token_ids_N, positions_N, kv_slots_GN, sampled_X, slots_X


@elements
def write_tokens(tokens_ST, slots_R, begin_R, counts_R, values_RW):
    for r in range(len(slots_R)):
        for i in range(counts_R[r]):
            if values_RW[r, i] >= 0:
                tokens_ST[slots_R[r], begin_R[r] + i] = values_RW[r, i]


@elements
def by_request(values, counts, by_request, num_requests, width, nothing):
    counts_R = carray(pointer(counts, _INT64), (num_requests,))
    values_X = carray(pointer(values, nothing), (counts_R.sum(),))
    values_RW = carray(pointer(by_request, nothing), (num_requests, width))
    values_RW[:] = nothing
    begin = 0
    for r in range(num_requests):
        for i in range(counts_R[r]):
            values_RW[r, i] = values_X[begin + i]
        begin += counts_R[r]
