"""RMSNorm, head norm with RoPE and K/V write, and gated activation: one compiled loop each, for CPUs.

PyTorch has no CPU kernels for them (its RMSNorm is twelve operators). These loops take one to three
microseconds. They compute in fp32 for all dtypes and round once, on write; a row's result does not depend on
other rows.

Legend: N rows, H hidden, I inner size, Q query heads, K kv heads, L layers, J = Q + 2 L K heads of a row, D
head dim, F that of values, T positions, S slots of a layer's K/V, w values of a slot, W all of all slots.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false, reportOperatorIssue=false

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray
from torch import Tensor

from ..layers.linear import Activation
from ..layers.rope import RotaryEmbedding
from .element_ops import LIKE, elements, finite_or_zero, float_of, pointer, rounded, sums

DTYPES = tuple(LIKE)


def norm_rotate_write(
    x_NO: Tensor,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    norm_JD: Tensor | None,
    eps: float,
    rope: RotaryEmbedding | None,
    positions_N: Tensor,
    slots_N: Tensor,
    kv_LSw: Tensor,
) -> None:
    """Norm and rotate q (in place) and k, and write k and v to their slots.

    NaNs and infinities are written as 0, as in `PagedKVCache.write`.

    Args:
        x_NO: rows of [Q, L * K keys, L * K values] heads, contiguous; of D, values of F.
        norm_JD: RMSNorm's weights of the heads of q and k, [Q + L * K, D]; None norms nothing.
        rope: None rotates nothing.
        positions_N, slots_N: absolute positions; slots of every layer. int64.
        kv_LSw: the layers' K/V; each slot is contiguous.
    """
    num_layers, _, width = kv_LSw.shape
    layer_stride, slot_stride, _ = kv_LSw.stride()
    v_head_dim = width // num_kv_heads - head_dim
    _norm_rotate_write(head_dim, v_head_dim, norm_JD is not None, rope is not None)(
        x_NO.data_ptr(), len(x_NO), num_heads, num_layers, num_kv_heads,
        0 if norm_JD is None else norm_JD.data_ptr(), eps, 0 if rope is None else rope.cos_TD.data_ptr(),
        0 if rope is None else rope.sin_TD.data_ptr(), 0 if rope is None else len(rope.cos_TD),
        positions_N.data_ptr(), slots_N.data_ptr(), kv_LSw.data_ptr(), layer_stride, slot_stride,
        LIKE[x_NO.dtype], LIKE[x_NO.dtype if norm_JD is None else norm_JD.dtype],
    )  # fmt: skip


def gate(gate_up_NI: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of the last dimension; contiguous."""
    num_rows, width = gate_up_NI.shape
    y_NI = gate_up_NI.new_empty(num_rows, width // 2)
    kernel = _silu_mul if activation == "silu" else _gelu_mul
    kernel(gate_up_NI.data_ptr(), y_NI.data_ptr(), num_rows, width // 2, LIKE[gate_up_NI.dtype])
    return y_NI


@sums
def _inverse_rms(x_D, eps):
    total = np.float32(0)
    for d in range(len(x_D)):
        total += float_of(x_D[d]) * float_of(x_D[d])
    return np.float32(1) / np.sqrt(total / np.float32(len(x_D)) + np.float32(eps))


@sums
def rms_norm(x, weight, y, num_rows, width, eps, like, weight_like):
    """Write x / sqrt(mean(x^2) + eps) * weight to rows `y`, in the dtype of `x`; all contiguous."""
    x_NH = carray(pointer(x, like), (num_rows, width))
    y_NH = carray(pointer(y, like), (num_rows, width))
    weight_H = carray(pointer(weight, weight_like), (width,))
    for n in range(num_rows):
        scale = _inverse_rms(x_NH[n], eps)
        for h in range(width):
            y_NH[n, h] = rounded(float_of(x_NH[n, h]) * scale * float_of(weight_H[h]), like)


@cache
def _norm_rotate_write(head_dim, v_head_dim, has_norm, rotates):
    """Return the kernel for one size: short loops over a head are fast only if their length is a constant."""
    half = head_dim // 2

    @sums
    def kernel(
        x, num_rows, num_heads, num_layers, num_kv, norm, eps, cos, sin, num_positions, positions, slots, kv,
        layer_stride, slot_stride, like, norm_like,
    ):  # fmt: skip
        num_keys = num_layers * num_kv
        values = (num_heads + num_keys) * head_dim
        x_NO = carray(pointer(x, like), (num_rows, values + num_keys * v_head_dim))
        norm_JD = carray(pointer(norm, norm_like), (num_heads + num_keys, head_dim))
        cos_TD = carray(pointer(cos, like), (num_positions, head_dim))
        sin_TD = carray(pointer(sin, like), (num_positions, head_dim))
        positions_N = carray(pointer(positions, np.int64(0)), (num_rows,))
        slots_N = carray(pointer(slots, np.int64(0)), (num_rows,))
        kv_W = carray(pointer(kv, like), (num_layers * layer_stride,))
        head_D = np.empty(head_dim, dtype=np.float32)
        for n in range(num_rows):
            t, slot = positions_N[n], slots_N[n]
            for j in range(num_heads + num_keys):
                x_D = x_NO[n, j * head_dim : (j + 1) * head_dim]
                if has_norm:
                    total = np.float32(0)
                    for d in range(head_dim):
                        total += float_of(x_D[d]) * float_of(x_D[d])
                    scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + np.float32(eps))
                    for d in range(head_dim):
                        head_D[d] = float_of(x_D[d]) * scale * float_of(norm_JD[j, d])
                else:
                    for d in range(head_dim):
                        head_D[d] = float_of(x_D[d])
                if rotates:
                    for d in range(half):
                        swapped = head_D[d + half] * float_of(sin_TD[t, d])
                        x_D[d] = rounded(head_D[d] * float_of(cos_TD[t, d]) + swapped, like)
                    for d in range(half, head_dim):
                        swapped = head_D[d - half] * float_of(sin_TD[t, d])
                        x_D[d] = rounded(head_D[d] * float_of(cos_TD[t, d]) + swapped, like)
                else:
                    for d in range(head_dim):
                        x_D[d] = rounded(head_D[d], like)
            for layer in range(num_layers):
                at = layer * layer_stride + slot * slot_stride
                for k in range(num_kv):
                    key = (num_heads + layer * num_kv + k) * head_dim
                    value = values + (layer * num_kv + k) * v_head_dim
                    for d in range(head_dim):
                        kv_W[at + k * head_dim + d] = finite_or_zero(x_NO[n, key + d])
                    for d in range(v_head_dim):
                        kv_W[at + num_kv * head_dim + k * v_head_dim + d] = finite_or_zero(x_NO[n, value + d])

    return kernel


@elements
def _exp(x):
    """Return e^x for x <= 0 to an ulp or two, in vectorizable operations (Cephes' expf)."""
    is_normal = x > np.float32(-87.0)
    x = x if is_normal else np.float32(0)
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * power if is_normal else np.float32(0)


@elements
def sigmoid(x):
    e = _exp(-abs(x))  # of -|x|: cannot overflow
    return (np.float32(1) if x > 0 else e) / (np.float32(1) + e)


@elements
def _silu_mul(gate_up, y, num_rows, inner, like):
    gate_up_N2I = carray(pointer(gate_up, like), (num_rows, 2, inner))
    y_NI = carray(pointer(y, like), (num_rows, inner))
    for n in range(num_rows):
        for i in range(inner):
            gate = float_of(gate_up_N2I[n, 0, i])
            y_NI[n, i] = rounded(gate * sigmoid(gate) * float_of(gate_up_N2I[n, 1, i]), like)


@elements
def _gelu_mul(gate_up, y, num_rows, inner, like):
    """GELU by tanh: x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    gate_up_N2I = carray(pointer(gate_up, like), (num_rows, 2, inner))
    y_NI = carray(pointer(y, like), (num_rows, inner))
    for n in range(num_rows):
        for i in range(inner):
            gate = float_of(gate_up_N2I[n, 0, i])
            cubed = gate + np.float32(0.044715) * gate * gate * gate
            weight = sigmoid(np.float32(1.5957691216057308) * cubed)
            y_NI[n, i] = rounded(gate * weight * float_of(gate_up_N2I[n, 1, i]), like)
