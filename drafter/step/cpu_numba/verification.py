"""Numba version of `../sampling/verification.py`: accepts drafts.

Legend: X sampled rows, R requests, K most drafts, W = K + 1.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ...compute.cpu_numba.element_ops import elements, pointer

_INT64 = np.int64(0)


def accept(chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    assert chosen_X.dtype == counts_R.dtype == drafts_RK.dtype == torch.int64, "read by address"
    chosen_X, counts_R, drafts_RK = chosen_X.contiguous(), counts_R.contiguous(), drafts_RK.contiguous()
    num_requests, num_drafts = drafts_RK.shape
    token_ids_RW = torch.empty(num_requests, num_drafts + 1, dtype=torch.int64)
    num_tokens_R = torch.empty(num_requests, dtype=torch.int64)
    _accept(
        chosen_X.data_ptr(),
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
