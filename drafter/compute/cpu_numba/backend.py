"""`NumbaBackend`: `EagerBackend` with compiled loops between its GEMMs and attention.

K/V in e4m3 are written by `EagerBackend`'s operators.

Serves what `cpu_fused/` does not: fp32, tensor-parallel ranks, and bf16 models with other blocks than it has.
Chosen at load (`actors/targets/loading/operator_factory.py`).

Legend: N rows, H hidden, O outputs, J heads of q and k, K kv heads, D head dim, L layers, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Attention, ContextWriter, DeviceCapabilities, ModelStackSpec, PlacedRows
from ..block_weights import AttentionShape, Projection
from ..eager.attention_metadata import EagerPass
from ..eager.backend import EagerAttention, EagerBackend, EagerContextWriter
from ..eager.moe import EagerExperts
from ..layers.gated_delta_net import DeltaNetShape
from ..layers.linear import Activation, RMSNorm
from ..layers.moe import Experts, ExpertWeights
from ..layers.rope import RotaryEmbedding
from ..memory.kv_cache import PagedKVCache
from . import layers
from .element_ops import LIKE
from .gated_delta_net import NumbaDeltaNet


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    """Return why this machine cannot use compiled loops, which support all models; None if it can."""
    if machine.device.type != "cpu" or machine.dtype not in layers.DTYPES:
        return "computes float32 and bfloat16 on CPUs"
    return None


class NumbaBackend(EagerBackend):
    """Computes fp32 and bf16 in compiled loops; operators without a loop are `EagerBackend`'s."""

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        y_NH, weight_H = torch.empty_like(x_NH), norm.weight_H
        likes = LIKE[x_NH.dtype], LIKE[weight_H.dtype]
        layers.rms_norm(x_NH.data_ptr(), weight_H.data_ptr(), y_NH.data_ptr(), *x_NH.shape, norm.eps, *likes)
        return y_NH

    def attention(self, shape: AttentionShape) -> Attention:
        return _NumbaAttention(shape) if shape.latent is None else super().attention(shape)

    def delta_net(self, shape: DeltaNetShape) -> Attention:
        return NumbaDeltaNet(shape)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _NumbaContextWriter(k_norm_LD, eps, num_kv_heads)

    def experts(self, weights: ExpertWeights) -> Experts:
        return EagerExperts(weights, self._count_experts(weights), self._linear_of, layers.gate)

    def gated(self, gate_up: Projection, normed_NH: Tensor, activation: Activation) -> Tensor:
        return layers.gate(gate_up(normed_NH), activation)


class _NumbaAttention(EagerAttention):
    __slots__ = ()

    def _norm_rotate_write(self, qkv_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> None:
        if cache.dtype is not qkv_NO.dtype:  # e4m3
            super()._norm_rotate_write(qkv_NO, step, cache, layer)
            return
        shape, rows = self._shape, step.rows
        layers.norm_rotate_write(
            qkv_NO, shape.head_dim, shape.num_heads, shape.num_kv_heads, self._norm_JD, shape.eps, shape.rope,
            rows.positions_N, rows.kv_slots[cache.group(layer)], cache.slots(layer),
        )  # fmt: skip


class _NumbaContextWriter:
    __slots__ = ("_definition", "_eps", "_norm_JD", "_num_kv", "_num_layers")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._definition = EagerContextWriter(k_norm_LD, eps, num_kv_heads)
        self._norm_JD = k_norm_LD.repeat_interleave(num_kv_heads, dim=0).contiguous()
        self._eps, self._num_kv, self._num_layers = eps, num_kv_heads, len(k_norm_LD)

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        if cache.dtype is not kv_NO.dtype:
            self._definition(kv_NO, rope, rows, cache, first)
            return
        layers.norm_rotate_write(
            kv_NO, self._norm_JD.shape[1], 0, self._num_kv, self._norm_JD, self._eps, rope, rows.positions_N,
            rows.kv_slots[cache.group(first)], cache.slots(first, self._num_layers),
        )  # fmt: skip
