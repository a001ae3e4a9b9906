"""RMSNorm, alone and fused with the residual addition; sums of squares of parts of a row: one launch each.

Triton versions of `layers.linear.RMSNorm` and `Backend.row_squares`. A program owns a row, or a part of it;
statistics are fp32 for all dtypes. Rows may have any stride; a row is contiguous.

Legend: N rows, H hidden, O elements of a row; B elements per iteration.
"""

# Type checkers do not know Triton's launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import dependent_launch, wait_for_predecessor

_WIDTH_PER_WARP = 256  # 8 elements per thread: one load of 16 bytes in bf16
_MAX_WARPS = 16
_BLOCK = 1024


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, [N, H], in fp32 and rounded once, as `F.rms_norm`.

    (Hugging Face's Qwen3RMSNorm also rounds before multiplying by the weight; the two differ by an ulp.)
    """
    normed_NH = x_NH.new_empty(x_NH.shape)
    _launch(x_NH, None, weight_H, eps, None, normed_NH, None)
    return normed_NH


def add_rms_norm(
    y_NH: Tensor, x_NH: Tensor, weight_H: Tensor, eps: float, scalar: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `x + y`, for a residual x, and the RMSNorm of the rounded sum: (sum [N, H], normed [N, H]).

    `x` is not changed: it may be a tap of the drafter. `scalar` multiplies the rounded sum, rounded again.
    """
    assert y_NH.shape == x_NH.shape and y_NH.dtype == x_NH.dtype, "a residual is added to its like"
    sum_NH, normed_NH = x_NH.new_empty(x_NH.shape), x_NH.new_empty(x_NH.shape)
    _launch(x_NH, y_NH, weight_H, eps, sum_NH, normed_NH, scalar)
    return sum_NH, normed_NH


def _launch(
    x_NH: Tensor,
    y_NH: Tensor | None,
    weight_H: Tensor,
    eps: float,
    sum_NH: Tensor | None,
    normed_NH: Tensor,
    scalar: float | None,
) -> None:
    num_rows, width = x_NH.shape
    assert weight_H.shape == (width,) and weight_H.is_contiguous(), "one weight per element of a row"
    assert x_NH.stride(1) == 1 and (y_NH is None or y_NH.stride(1) == 1), "a row must be contiguous"
    block = 1 << (width - 1).bit_length()
    _rms_norm[(num_rows,)](
        x_NH, y_NH, weight_H, sum_NH, normed_NH,
        x_NH.stride(0), (x_NH if y_NH is None else y_NH).stride(0), eps, scalar,
        WIDTH=width, BLOCK=block, num_warps=warps_for(block), **dependent_launch(x_NH.device),
    )  # fmt: skip


def warps_for(block: int) -> int:
    """Return the warps of a program that owns a row of `block` elements (a power of two)."""
    return min(max(block // _WIDTH_PER_WARP, 1), _MAX_WARPS)


@triton.jit
def _rms_norm(
    x_ptr, y_ptr, weight_ptr, sum_ptr, normed_ptr, x_stride, y_stride, eps, scalar,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    columns_H = tl.arange(0, BLOCK)
    inside_H = columns_H < WIDTH
    weight_H = tl.load(weight_ptr + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    x_H = tl.load(x_ptr + row * x_stride + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    if y_ptr is not None:
        y_H = tl.load(y_ptr + row * y_stride + columns_H, mask=inside_H, other=0.0).to(tl.float32)
        sum_H = (x_H + y_H).to(dtype)
        if scalar is not None:
            sum_H = (sum_H.to(tl.float32) * scalar).to(dtype)
        tl.store(sum_ptr + row * WIDTH + columns_H, sum_H, mask=inside_H)
        x_H = sum_H.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_H * x_H, axis=0) / WIDTH + eps)
    normed_H = (x_H * scale * weight_H).to(dtype)
    tl.store(normed_ptr + row * WIDTH + columns_H, normed_H, mask=inside_H)


def row_squares(x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
    """Return sums of squares, fp32 [N, 2], of `widths[0]` elements of a row and of the next `widths[1]`."""
    first, second = widths
    assert x_NO.stride(1) == 1 and first + second <= x_NO.shape[1], "parts of rows that are contiguous"
    squares_N2 = torch.empty(len(x_NO), 2, dtype=torch.float32, device=x_NO.device)
    _row_squares[(len(x_NO), 2)](
        x_NO, squares_N2, x_NO.stride(0),
        FIRST=first, SECOND=second, BLOCK=_BLOCK, num_warps=4, **dependent_launch(x_NO.device),
    )  # fmt: skip
    return squares_N2


@triton.jit
def _row_squares(
    x_ptr, squares_ptr, x_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
