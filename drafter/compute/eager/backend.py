"""`TorchBackend`: PyTorch's own operators one by one; the fallback anywhere, and what the others mean.

Legend: N rows, H hidden, O outputs, K kv heads, J = Q + 2 K, D head dim, L layers, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import Attention, AttentionShape, ContextWriter, PlacedRows, Projection
from ..blocks import OperatorBackend
from ..kv_cache import PagedKVCache
from ..layers import HeadNorm, RMSNorm, silu_mul
from ..rope import RotaryEmbedding, Rotation
from .attention import AttentionBatch, paged_attention


@dataclass(frozen=True, slots=True)
class _TorchPass:
    """What the layers of a pass share: indices and masks, and the rotation of its rows."""

    rotation: Rotation
    kv_slots_N: Tensor
    batch: AttentionBatch


class TorchBackend(OperatorBackend):
    """PyTorch's own operators; residuals are added by the products themselves."""

    attention_batch = staticmethod(AttentionBatch.build)

    def begin(self, rope: RotaryEmbedding, rows: PlacedRows) -> _TorchPass:
        return _TorchPass(rope.at(rows.positions_N), rows.kv_slots_N, rows.batch)

    def attention(self, shape: AttentionShape) -> Attention:
        return _TorchAttention(shape)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _TorchContextWriter(k_norm_LD, eps, num_kv_heads)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return norm(x_NH)

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        x_NH = project(x_NI, residual_NH)
        return x_NH, norm(x_NH)

    def silu_mul(self, gate_up_NI: Tensor) -> Tensor:
        return silu_mul(gate_up_NI)


class _TorchAttention:
    __slots__ = ("_causal", "_head_norm", "_num_kv", "_num_q", "_scale", "_shape", "_window")

    def __init__(self, shape: AttentionShape) -> None:
        self._num_q, self._num_kv = shape.num_heads, shape.num_kv_heads
        norm_JD = shape.head_norm()
        self._head_norm = None if norm_JD is None else HeadNorm(norm_JD, shape.eps)
        self._shape = (self._num_q + 2 * self._num_kv, shape.head_dim)
        self._scale = shape.head_dim**-0.5
        self._causal, self._window = shape.causal, shape.window

    def __call__(self, qkv_NO: Tensor, step: _TorchPass, cache: PagedKVCache, layer: int) -> Tensor:
        num_q, num_kv = self._num_q, self._num_kv
        qkv_NJD = qkv_NO.unflatten(-1, self._shape)
        qk = qkv_NJD[:, : num_q + num_kv]
        step.rotation.rotate(qk if self._head_norm is None else self._head_norm(qk), out_NJD=qk)
        cache.write(layer, step.kv_slots_N, qkv_NJD[:, num_q:].unflatten(1, (2, num_kv)))
        return paged_attention(
            qkv_NJD[:, :num_q],
            cache,
            layer,
            step.batch,
            self._scale,
            causal=self._causal,
            window=self._window,
        )


class _TorchContextWriter:
    __slots__ = ("_head_dim", "_k_norm", "_num_kv", "_num_layers")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._num_layers, self._head_dim = k_norm_LD.shape
        self._num_kv = num_kv_heads
        self._k_norm = HeadNorm(k_norm_LD.repeat_interleave(num_kv_heads, dim=0), eps)

    def __call__(self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache) -> None:
        num_keys = self._num_layers * self._num_kv
        kv_NJD = kv_NO.unflatten(-1, (2 * num_keys, self._head_dim))
        keys = kv_NJD[:, :num_keys]
        rope.at(rows.positions_N).rotate(self._k_norm(keys), out_NJD=keys)
        kv_LN2KD = kv_NJD.unflatten(1, (2, self._num_layers, self._num_kv)).permute(2, 0, 1, 3, 4)
        cache.write_all(rows.kv_slots_N, kv_LN2KD)
