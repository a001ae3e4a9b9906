"""Numba version of `../inputs/row_layout.py`: positions, K/V slots and tokens of a step's rows.

Called by `request_states.py` and `dflash/proposer.py`.

Legend: N rows, X sampled rows, R requests, W values of a request, S slots, P pages of a request, T tokens, G
page groups.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ...compute.cpu_numba.element_ops import elements, pointer
from ..inputs.row_layout import Ints, Layout

_INT64 = np.int64(0)
_NOTHING = {torch.int64: np.int64(-1), torch.float32: np.float32(np.nan)}


def lay_out_rows(
    tokens_ST: Tensor,
    slots_R: Ints,
    first_R: Ints,
    num_rows_R: Ints,
    counts_R: Ints,
    page_tables_GSP: Ints,
    page_size: int,
) -> Layout:
    token_ids_N, *layout = _lay_out_rows(
        tokens_ST.numpy(), slots_R, first_R, num_rows_R, counts_R, page_tables_GSP, page_size
    )
    return torch.from_numpy(token_ids_N), *layout


def write_tokens(tokens_ST: Tensor, slots_R: Ints, begin_R: Ints, counts_R: Ints, values_RW: Tensor) -> None:
    """Write each request's first `counts` values, except negative ones, from position `begin` on."""
    _write_tokens(tokens_ST.numpy(), slots_R, begin_R, counts_R, values_RW.numpy())


def by_request(values_X: Tensor, counts_R: Tensor, width: int) -> Tensor:
    """Scatter int64 or fp32 values [X] to requests [R, W]; see the definition."""
    assert counts_R.dtype == torch.int64, "read by address"
    values_X, counts_R = values_X.contiguous(), counts_R.contiguous()
    num_requests, nothing = len(counts_R), _NOTHING[values_X.dtype]
    values_RW = torch.empty(num_requests, width, dtype=values_X.dtype)
    _by_request(values_X.data_ptr(), counts_R.data_ptr(), values_RW.data_ptr(), num_requests, width, nothing)
    return values_RW


@elements
def _lay_out_rows(tokens_ST, slots_R, first_R, num_rows_R, counts_R, page_tables_GSP, page_size):
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
def _write_tokens(tokens_ST, slots_R, begin_R, counts_R, values_RW):
    for r in range(len(slots_R)):
        for i in range(counts_R[r]):
            if values_RW[r, i] >= 0:
                tokens_ST[slots_R[r], begin_R[r] + i] = values_RW[r, i]


@elements
def _by_request(values, counts, by_request, num_requests, width, nothing):
    counts_R = carray(pointer(counts, _INT64), (num_requests,))
    values_X = carray(pointer(values, nothing), (counts_R.sum(),))
    values_RW = carray(pointer(by_request, nothing), (num_requests, width))
    values_RW[:] = nothing
    begin = 0
    for r in range(num_requests):
        for i in range(counts_R[r]):
            values_RW[r, i] = values_X[begin + i]
        begin += counts_R[r]
