"""How a layer's small operations are computed: PyTorch's kernels one by one, or a few fused ones.

`TorchBackend` is the CPU's, and the fallback elsewhere; `kernels/backend.py` holds the GPU's, of the same
meaning. Matrix products are not here (`layers.Linear`), nor is the order of operations (`block.py`).

    begin(rope, rows)     once per pass of a model: what all its layers share
    attention(shape)      once per layer at load; called: head norm, rotation, K/V into pages, attention
    context_writer(...)   once per drafter at load; called: norm, rotation, context K/V of all layers
    norm, residual_norm, silu_mul

Legend: N rows, H hidden, O outputs, Q query heads, K kv heads, J = Q + 2K, D head dim, L layers, I inner
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import AttentionBatch, paged_attention
from .kv_cache import PagedKVCache
from .layers import HeadNorm, RMSNorm, RotaryEmbedding, Rotation, silu_mul

# A projection back to the hidden state: y [N, H] of x, plus the residual if one is given.
Projection = Callable[[Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        q_norm_D, k_norm_D: weights of the heads' RMSNorm; both None where the model has none.
        eps: of these norms.
        causal, window: as in `attention.paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    causal: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a pass and their places.

    Attributes:
        positions_N: absolute positions.
        kv_slots_N: where each row's K and V go.
        batch: what the backend's attention wants to know of the step: an `AttentionBatch`, or its kin.
    """

    positions_N: Tensor
    kv_slots_N: Tensor
    batch: Any


class Attention(Protocol):
    """Head norm, rotation, K/V write and attention of one layer."""

    def __call__(self, qkv_NO: Tensor, step: Any, cache: PagedKVCache, layer: int) -> Tensor:
        """[N, Q * D] from the layer's q, k and v; `step` is what `begin` made. `qkv` is overwritten."""
        ...


class ContextWriter(Protocol):
    """Norm, rotation and write of the drafter's context K/V."""

    def __call__(self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache) -> None:
        """`kv_NO` holds all layers' keys, then all layers' values; overwritten."""
        ...


class Backend(Protocol):
    """See the module's text."""

    def begin(self, rope: RotaryEmbedding, rows: PlacedRows) -> Any: ...

    def attention(self, shape: AttentionShape) -> Attention: ...

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter: ...

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor: ...

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The new residual, project(x) + residual, and its norm. The old residual stays as it was."""
        ...

    def silu_mul(self, gate_up_NI: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _TorchPass:
    """What the layers of a pass share: indices and masks, and the rotation of its rows."""

    rotation: Rotation
    kv_slots_N: Tensor
    batch: AttentionBatch


class TorchBackend:
    """PyTorch's own operators; residuals are added by the products themselves."""

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
        self._head_norm: HeadNorm | None = None
        if shape.q_norm_D is not None and shape.k_norm_D is not None:
            q_JD, k_JD = shape.q_norm_D.expand(self._num_q, -1), shape.k_norm_D.expand(self._num_kv, -1)
            self._head_norm = HeadNorm(torch.cat((q_JD, k_JD)), shape.eps)
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
