"""The gated activation of an MLP in one launch (`layers.linear.gate`). Legend: N rows, I inner size."""

# Type checkers do not know Triton's launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...layers.linear import Activation
from ..common.launch import dependent_launch, wait_for_predecessor

_STEEPNESS = tl.constexpr(1.702)  # alpha of gpt-oss's swiglu
_BLOCK = 1024  # 8 elements per thread of 4 warps; 16 rows of 12288 make 192 programs


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
    block = min(1 << (inner - 1).bit_length(), _BLOCK)
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
