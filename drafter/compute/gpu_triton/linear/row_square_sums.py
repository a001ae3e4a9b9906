"""Sums of squares of the parts of a row, for norms of whole queries and whole keys.

Triton version of `Backend.row_squares`. A program owns a part of a row, so that its bits depend on no other
row.

Legend: N rows, O elements of a row, parts are queries and keys; B elements per iteration.
"""

# Type checkers do not know Triton's launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import dependent_launch, wait_for_predecessor

_BLOCK = 1024


def row_squares(x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
    """Return fp32 [N, 2]: the sums over the first `widths[0]` elements of each row, and the next `widths[1]`.

    Args:
        x_NO: rows may have any stride, a row is contiguous.
    """
    first, second = widths
    assert x_NO.stride(1) == 1 and first + second <= x_NO.shape[1], "parts of rows that are contiguous"
    squares_N2 = torch.empty(len(x_NO), 2, dtype=torch.float32, device=x_NO.device)
    _row_squares[(len(x_NO), 2)](
        x_NO,
        squares_N2,
        x_NO.stride(0),
        FIRST=first,
        SECOND=second,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch(x_NO.device),
    )
    return squares_N2


@triton.jit
def _row_squares(
    x_ptr,
    squares_ptr,
    x_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(part == 0, FIRST, SECOND)
    x_ptr += row * x_stride + part * FIRST
    columns_B = tl.arange(0, BLOCK)
    sums_B = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, max(FIRST, SECOND), BLOCK):
        inside_B = begin + columns_B < width
        x_B = tl.load(x_ptr + begin + columns_B, mask=inside_B, other=0.0).to(tl.float32)
        sums_B += x_B * x_B
    tl.store(squares_ptr + row * 2 + part, tl.sum(sums_B, axis=0))
