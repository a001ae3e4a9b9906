"""Triton version of `compute/blocks.py`: DFlash2's convolution in one launch.

Each program has some rows and some groups of channels; a row is loaded again for each tap. Memory bound: a
few kilobytes per row. Called by `drafter/compute/gpu_triton/backend.py`.

Legend: N rows, H hidden, T taps, C groups of H / C adjacent channels.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.element_ops import dependent_launch, wait_for_predecessor

_ROWS, _COLUMNS = 4, 256  # per program


def convolve(
    x_NH: Tensor, dynamic_NTC: Tensor, base_TH: Tensor, owners_N: Tensor, residual_NH: Tensor | None = None
) -> Tensor:
    num_rows, hidden = x_NH.shape
    num_taps, num_groups = dynamic_NTC.shape[1:]
    assert dynamic_NTC.stride(2) == 1 and x_NH.is_contiguous() and base_TH.is_contiguous(), "read as they lie"
    assert residual_NH is None or residual_NH.is_contiguous(), "read as it lies"
    y_NH = torch.empty_like(x_NH)
    if num_rows:
        _convolve[triton.cdiv(num_rows, _ROWS), triton.cdiv(hidden, _COLUMNS)](
            x_NH, dynamic_NTC, base_TH, owners_N, residual_NH, y_NH, num_rows, dynamic_NTC.stride(0),
            dynamic_NTC.stride(1),
            HIDDEN=hidden, GROUP=hidden // num_groups, TAPS=num_taps, ROWS=_ROWS, COLUMNS=_COLUMNS,
            **dependent_launch(x_NH.device),
        )  # fmt: skip
    return y_NH


# The second side's kernels may begin at any alignment; owners may be a view.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["dynamic", "owners"])
def _convolve(
    x, dynamic, base, owners, residual, y, num_rows, row_stride, tap_stride,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < HIDDEN
    is_inside = is_row[:, None] & is_column[None, :]
    places = rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    owner = tl.load(owners + rows, mask=is_row, other=0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if residual is not None:
        total = tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        is_own = is_row & (rows >= tap)
        is_own &= tl.load(owners + rows - tap, mask=is_own, other=0) == owner
        is_read = is_own[:, None] & is_column[None, :]
        kernel_at = rows.to(tl.int64)[:, None] * row_stride + tap * tap_stride + (columns // GROUP)[None, :]
        kernel = tl.load(dynamic + kernel_at, mask=is_read, other=0.0).to(tl.float32)
        kernel += tl.load(base + tap * HIDDEN + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        values = tl.load(x + places - tap * HIDDEN, mask=is_read, other=0.0).to(tl.float32)
        total += kernel * values
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_inside)
