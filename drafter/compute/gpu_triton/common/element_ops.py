"""Norms and gates of rows, one launch each, and the launch options that all kernels share.

Triton versions of `layers.linear.RMSNorm`, alone and fused with the residual addition, of
`Backend.row_squares`, and of an MLP's gated activation (`layers.linear.gate`). A program owns a row, or a
part of it; statistics are fp32 for all dtypes. Rows may have any stride; a row is contiguous.

Programmatic dependent launch: a kernel is set up while the previous one still runs (sm_90 and newer).

    host      _kernel[grid](..., **dependent_launch(x.device))
    kernel    wait_for_predecessor(PDL) comes first, before anything is read or written

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization". `griddepcontrol.wait`
returns when the previous kernel is complete and its writes are visible. As every program waits before it does
anything, a kernel completes only after all earlier ones. Therefore `launch_dependents` may be issued at once:
it lets the next kernel be set up, which also waits if it was launched with these options; otherwise it starts
after this one's end, as usual. This hides launch latency, not the first loads; products prefetch their first
weights into L2 before they wait (`skinny_gemm.py`), which reads no value.

Legend: N rows, H hidden, I inner size, O elements of a row; B elements per iteration.
"""

# Type checkers know neither Triton's launch options nor its backends.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layers.linear import Activation

_FIRST_CAPABILITY = (9, 0)
_WIDTH_PER_WARP = 256  # 8 elements per thread: one load of 16 bytes in bf16
_MAX_WARPS = 16
_SQUARES_BLOCK = 1024
_GATE_BLOCK = 1024  # 8 elements per thread of 4 warps; 16 rows of 12288 make 192 programs
_STEEPNESS = tl.constexpr(1.702)  # alpha of gpt-oss's swiglu


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return launch options and the compile-time argument `PDL` of a kernel that waits first."""
    if device.type != "cuda" or torch.version.hip or os.environ.get("TRITON_INTERPRET"):
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the previous kernel, then allow the next one to launch; no-op without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


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
        sum_H = rounded_sum(x_H, y_H, scalar, dtype)
        tl.store(sum_ptr + row * WIDTH + columns_H, sum_H, mask=inside_H)
        x_H = sum_H.to(tl.float32)
    tl.store(normed_ptr + row * WIDTH + columns_H, normed(x_H, weight_H, eps, WIDTH, dtype), mask=inside_H)


@triton.jit
def rounded_sum(x_H, y_H, scalar, dtype: tl.constexpr):
    """Return x + y of fp32 rows, times `scalar` if it is given, each rounded to `dtype`."""
    sum_H = (x_H + y_H).to(dtype)
    if scalar is not None:
        sum_H = (sum_H.to(tl.float32) * scalar).to(dtype)
    return sum_H


@triton.jit
def normed(x_H, weight_H, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Return the RMSNorm of an fp32 row of WIDTH elements, padded with zeros."""
    scale = tl.rsqrt(tl.sum(x_H * x_H, axis=0) / WIDTH + eps)
    return (x_H * scale * weight_H).to(dtype)


def row_squares(x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
    """Return sums of squares, fp32 [N, 2], of `widths[0]` elements of a row and of the next `widths[1]`."""
    first, second = widths
    assert x_NO.stride(1) == 1 and first + second <= x_NO.shape[1], "parts of rows that are contiguous"
    squares_N2 = torch.empty(len(x_NO), 2, dtype=torch.float32, device=x_NO.device)
    _row_squares[(len(x_NO), 2)](
        x_NO, squares_N2, x_NO.stride(0),
        FIRST=first, SECOND=second, BLOCK=_SQUARES_BLOCK, num_warps=4, **dependent_launch(x_NO.device),
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


def gate(gate_up_NI2: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of the last dimension: [N, 2 * I] -> [N, I].

    The activation is computed in fp32 and rounded before the product is, like PyTorch's two operations. Rows
    may be strided.
    """
    num_rows, width = gate_up_NI2.shape
    assert width % 2 == 0, "gate and up have one width"
    assert gate_up_NI2.stride(1) == 1, "a row must be contiguous"
    inner = width // 2
    product_NI = gate_up_NI2.new_empty((num_rows, inner))
    block = min(1 << (inner - 1).bit_length(), _GATE_BLOCK)
    _gate_mul[(num_rows, triton.cdiv(inner, block))](
        gate_up_NI2, product_NI, gate_up_NI2.stride(0),
        INNER=inner, BLOCK=block, GELU=activation == "gelu_tanh", num_warps=4,
        **dependent_launch(gate_up_NI2.device),
    )  # fmt: skip
    return product_NI


@triton.jit
def _gate_mul(
    gate_up_ptr, product_ptr, row_stride,
    INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    columns_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_I = columns_I < INNER
    gate_ptrs_I = gate_up_ptr + row * row_stride + columns_I
    gate_I = tl.load(gate_ptrs_I, mask=inside_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_ptrs_I + INNER, mask=inside_I, other=0.0).to(tl.float32)
    act_I = activate(gate_I, GELU, dtype)
    tl.store(product_ptr + row * INNER + columns_I, (act_I * up_I).to(dtype), mask=inside_I)


@triton.jit
def activate(gate, GELU: tl.constexpr, dtype: tl.constexpr):
    """Return the activation of fp32 values, rounded to `dtype`, as fp32; also called by `skinny_gemm.py`."""
    x = gate
    if GELU:  # by tanh: x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)


@triton.jit
def expert_gate(gate, up, limit, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return an expert's gated activation of fp32 values, in `dtype`; see `compute/eager/moe.py`."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        product = (up + 1.0) * gate / (1.0 + tl.exp(-(gate * _STEEPNESS)))
    else:
        product = activate(gate, ACTIVATION == "gelu_tanh", dtype) * up
    return product.to(dtype)
