"""Basic layers of target and drafter: Linear, RMSNorm, gated activation.

Plain callables over tensors, not nn.Modules: nothing is trained here, and every framework call costs
microseconds at batch 1. Weights are repacked for speed on construction.

Legend: N rows, H hidden, O outputs, I inner size, J heads (of any kind), D head dim; P parts, L layers, R
rows of a block of a weight.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["silu", "gelu_tanh"]

_PACKABLE = (torch.float32, torch.bfloat16)
_ROWS_HINT = 16  # rows of a verified block, for which the packed layout is tuned
_SUMMED_ALIKE = 1024  # inputs up to which oneDNN sums one row of fp32 in the order of several


def in_fp32(x: Tensor) -> Tensor:
    """Convert to fp32; keep fp64, in which definitions check other backends' results."""
    return x if x.dtype is torch.float64 else x.float()


class Linear:
    """y = x W^T (+ bias) (+ residual), for W [O, H].

    On a CPU the weight is reordered once into oneDNN's blocked layout, and the plain weight is dropped: twice
    as fast at 16 rows, and in fp32 a row's bits are the same for any number of rows (test_drafter_layers.py).
    A single row of many inputs is computed twice, since it would be summed in another order. Elsewhere this
    is `F.linear`.
    """

    __slots__ = ("_bias", "_packed", "_pads_single_rows", "_weight", "dtype", "in_features", "out_features")

    def __init__(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OH.shape
        self.dtype = weight_OH.dtype
        self._bias = bias_O
        self._packed: Tensor | None = None
        self._weight: Tensor | None = None
        self._pads_single_rows = self.dtype is torch.float32 and self.in_features > _SUMMED_ALIKE
        if _can_pack(weight_OH):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OH.contiguous(), _ROWS_HINT)
        else:
            self._weight = weight_OH

    def __call__(self, x_NH: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        if self._packed is None:
            y_NO = F.linear(x_NH, self._weight, self._bias)  # type: ignore[arg-type]
            return y_NO if residual_NO is None else y_NO + residual_NO
        if self._pads_single_rows and len(x_NH) == 1:
            both_2O = None if residual_NO is None else residual_NO.repeat(2, 1)
            return self(x_NH.repeat(2, 1), both_2O)[:1]
        if residual_NO is None:
            return torch.ops.mkldnn._linear_pointwise(x_NH, self._packed, self._bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x_NH, residual_NO, self._packed, self._bias, "add")


class BlockLinear:
    """`Linear` of a weight O = P * L * R; its blocks of rows may be strided; nothing is copied."""

    __slots__ = ("_bias_O", "_weight_PLRH")

    def __init__(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_PLRH, self._bias_O = weight_PLRH, bias_O

    def __call__(self, x_NH: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        parts, layers, rows, _ = self._weight_PLRH.shape
        y_NO = x_NH.new_empty((len(x_NH), parts * layers * rows))
        y_PLNR = y_NO.view(-1, parts, layers, rows).permute(1, 2, 0, 3)
        x_LNH = x_NH.expand(layers, -1, -1)
        for weight_LRH, y_LNR in zip(self._weight_PLRH.unbind(), y_PLNR.unbind(), strict=True):
            torch.bmm(x_LNH, weight_LRH.transpose(1, 2), out=y_LNR)
        if self._bias_O is not None:
            y_NO.add_(self._bias_O)
        return y_NO if residual_NO is None else y_NO.add_(residual_NO)


def linear_of_blocks(weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Linear | BlockLinear:
    """Return the projection with a blocked weight; repacked where `Linear` repacks, otherwise not copied."""
    if _can_pack(weight_PLRH):
        return Linear(weight_PLRH.flatten(0, 2), bias_O)
    return BlockLinear(weight_PLRH, bias_O)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _PACKABLE:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once.

    The weight may be fp32 where `x` is not (Gemma's 1 + w is not representable in bf16).
    """

    __slots__ = ("_shape", "eps", "weight_H")

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        self.weight_H = weight_H
        self.eps = eps
        self._shape = (weight_H.shape[-1],)

    def __call__(self, x_NH: Tensor) -> Tensor:
        if self.weight_H.dtype is not x_NH.dtype:
            return F.rms_norm(x_NH.float(), self._shape, self.weight_H, self.eps).to(x_NH.dtype)
        return F.rms_norm(x_NH, self._shape, self.weight_H, self.eps)


class HeadNorm:
    """RMSNorm per head, e.g. of q and k at once; also rounds before the weight, unless only that is fp32."""

    __slots__ = ("_eps", "_shape", "_weight_JD")

    def __init__(self, weight_JD: Tensor, eps: float) -> None:
        self._weight_JD = weight_JD.contiguous()
        self._shape = (weight_JD.shape[-1],)
        self._eps = eps

    def __call__(self, x_NJD: Tensor) -> Tensor:
        if self._weight_JD.dtype is not x_NJD.dtype:
            normed_NJD = F.rms_norm(x_NJD.float(), self._shape, None, self._eps)
            return normed_NJD.mul_(self._weight_JD).to(x_NJD.dtype)
        return F.rms_norm(x_NJD, self._shape, None, self._eps).mul_(self._weight_JD)


def scaled_logits(z_XV: Tensor, multiplier: float, cap: float | None) -> Tensor:
    """Return cap * tanh(multiplier * z / cap), the final logits; a cap of None is none."""
    if multiplier != 1.0:
        z_XV = z_XV * multiplier
    return z_XV if cap is None else torch.tanh(z_XV / cap).mul_(cap)


def gate(gate_up_NI: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) * second half of the last dimension."""
    gate_NI, up_NI = gate_up_NI.chunk(2, dim=-1)
    act_NI = F.silu(gate_NI) if activation == "silu" else F.gelu(gate_NI, approximate="tanh")
    return act_NI.mul_(up_NI)
