"""A layer's small operations in fused kernels: what `TritonBackend` offers is what `TorchBackend` means.

Per layer: one launch norms and rotates q and k and writes K/V, one or two attend, one adds the residual and
norms it (twice), one makes SwiGLU's product; beside them only matrix products. Nothing asks the host for a
value, so that a CUDA graph may hold it all. Chosen at load (`actors/targets/loading/operators.py`).

Legend: N rows, H hidden, O outputs, D head dim, L layers, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..backend import Attention, AttentionShape, ContextWriter, PlacedRows, Projection
from ..blocks import OperatorBackend
from ..kv_cache import PagedKVCache
from ..layers import RMSNorm
from ..rope import RotaryEmbedding
from .activations import silu_mul
from .attention import verify_attention
from .norms import add_rms_norm, rms_norm
from .tiles import MAX_PARTIALS, AttentionWorkspace, PagedRows, rows_from_host
from .write_kv import norm_rotate_write, write_context


class PagedAttention(Protocol):
    """`attention.verify_attention`, or what stands in its place (`flash_attention.FlashAttention`)."""

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        scale: float,
        *,
        causal: bool,
        window: int | None,
        workspace: AttentionWorkspace,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of a pass share; `rows.batch` is a `PagedRows`."""

    rope: RotaryEmbedding
    rows: PlacedRows


class TritonBackend(OperatorBackend):
    """See the module's text.

    Args:
        device: of the workspaces.
        attend: what attends.
    """

    attention_batch = staticmethod(rows_from_host)

    def __init__(self, device: torch.device | str, attend: PagedAttention = verify_attention) -> None:
        self._device = device
        self._attend = attend
        self._workspaces: dict[int, AttentionWorkspace] = {}  # by head dim; layers take turns

    def begin(self, rope: RotaryEmbedding, rows: PlacedRows) -> _Pass:
        return _Pass(rope, rows)

    def attention(self, shape: AttentionShape) -> Attention:
        workspace = self._workspaces.get(shape.head_dim)
        if workspace is None:
            workspace = AttentionWorkspace(MAX_PARTIALS, shape.head_dim, self._device)
            self._workspaces[shape.head_dim] = workspace
        return _TritonAttention(shape, self._attend, workspace)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _TritonContextWriter(k_norm_LD.contiguous(), eps, num_kv_heads)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return rms_norm(x_NH, norm.weight_H, norm.eps)

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(project(x_NI, None), residual_NH, norm.weight_H, norm.eps)

    def silu_mul(self, gate_up_NI: Tensor) -> Tensor:
        return silu_mul(gate_up_NI)


class _TritonAttention:
    __slots__ = ("_attend", "_heads", "_scale", "_shape", "_workspace")

    def __init__(self, shape: AttentionShape, attend: PagedAttention, workspace: AttentionWorkspace) -> None:
        self._shape = shape
        self._attend, self._workspace = attend, workspace
        self._heads = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        self._scale = shape.head_dim**-0.5

    def __call__(self, qkv_NO: Tensor, step: _Pass, cache: PagedKVCache, layer: int) -> Tensor:
        shape, rows, rope = self._shape, step.rows, step.rope
        qkv_NJD = qkv_NO.unflatten(-1, self._heads)
        k_PSKD, v_PSKD = cache.pages(layer).unbind(2)
        norm_rotate_write(
            qkv_NJD,
            shape.q_norm_D,
            shape.k_norm_D,
            shape.eps,
            rope.cos_TD,
            rope.sin_TD,
            rows.positions_N,
            rows.kv_slots_N,
            k_PSKD,
            v_PSKD,
        )
        return self._attend(
            qkv_NJD[:, : shape.num_heads],
            k_PSKD,
            v_PSKD,
            rows.batch,
            self._scale,
            causal=shape.causal,
            window=shape.window,
            workspace=self._workspace,
        )


class _TritonContextWriter:
    __slots__ = ("_eps", "_k_norm_LD", "_shape")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._k_norm_LD, self._eps = k_norm_LD, eps
        num_layers, head_dim = k_norm_LD.shape
        self._shape = (2 * num_layers * num_kv_heads, head_dim)

    def __call__(self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache) -> None:
        write_context(
            kv_NO.unflatten(-1, self._shape),
            self._k_norm_LD,
            self._eps,
            rope.cos_TD,
            rope.sin_TD,
            rows.positions_N,
            rows.kv_slots_N,
            cache.kv,
        )
