"""What `TorchBackend` means on CPUs: compiled loops between its products and attention.

Serves fp32, a target's rank of several, and bf16 where `compiled/` cannot. Chosen at load
(`actors/targets/loading/operators.py`).

Legend: N rows, H hidden, O outputs, J heads of q and k, K kv heads, D head dim, L layers, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import Attention, AttentionShape, ContextWriter, PlacedRows, Projection
from ..blocks import OperatorBackend
from ..eager.attention import AttentionBatch, paged_attention
from ..kv_cache import PagedKVCache
from ..layers import RMSNorm
from ..rope import RotaryEmbedding
from . import layers


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of a pass share; `rows.batch` is an `AttentionBatch`."""

    rope: RotaryEmbedding
    rows: PlacedRows


class CpuBackend(OperatorBackend):
    """Compiled loops for fp32 and bf16; residuals are added by the products themselves."""

    attention_batch = staticmethod(AttentionBatch.build)

    def begin(self, rope: RotaryEmbedding, rows: PlacedRows) -> _Pass:
        return _Pass(rope, rows)

    def attention(self, shape: AttentionShape) -> Attention:
        return _CpuAttention(shape)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _CpuContextWriter(k_norm_LD, eps, num_kv_heads)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return layers.rms_norm(x_NH, norm.weight_H, norm.eps)

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        x_NH = project(x_NI, residual_NH)
        return x_NH, layers.rms_norm(x_NH, norm.weight_H, norm.eps)

    def silu_mul(self, gate_up_NI: Tensor) -> Tensor:
        return layers.silu_mul(gate_up_NI)


class _CpuAttention:
    __slots__ = ("_norm_JD", "_scale", "_shape")

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._norm_JD = shape.head_norm()
        self._scale = shape.head_dim**-0.5

    def __call__(self, qkv_NO: Tensor, step: _Pass, cache: PagedKVCache, layer: int) -> Tensor:
        shape, rows = self._shape, step.rows
        layers.norm_rotate_write(
            qkv_NO,
            shape.num_heads,
            shape.num_kv_heads,
            self._norm_JD,
            shape.eps,
            step.rope,
            rows.positions_N,
            rows.kv_slots_N,
            cache.slots(layer),
        )
        q_NQD = qkv_NO.view(len(qkv_NO), -1, shape.head_dim)[:, : shape.num_heads]
        return paged_attention(
            q_NQD, cache, layer, rows.batch, self._scale, causal=shape.causal, window=shape.window
        )


class _CpuContextWriter:
    __slots__ = ("_eps", "_norm_JD", "_num_kv")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._norm_JD = k_norm_LD.repeat_interleave(num_kv_heads, dim=0).contiguous()
        self._eps, self._num_kv = eps, num_kv_heads

    def __call__(self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache) -> None:
        layers.norm_rotate_write(
            kv_NO,
            0,
            self._num_kv,
            self._norm_JD,
            self._eps,
            rope,
            rows.positions_N,
            rows.kv_slots_N,
            cache.slots_LN2KD,
        )
