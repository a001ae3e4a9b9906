"""A layer's small operations in fused kernels: what `TritonBackend` offers is what `TorchBackend` means.

Per layer: one launch norms and rotates q and k and writes K/V, one or two attend, one adds the residual and
norms it (twice), one makes the gated product; beside them only matrix products. Nothing asks the host for a
value, so that a CUDA graph may hold it all. Chosen at load (`actors/targets/loading/operators.py`).

Legend: N rows, H hidden, O outputs, D head dim, L layers, I inner size.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from ..backend import Attention, AttentionShape, ContextWriter, Machine, PlacedRows, Projection, StackSpec
from ..blocks import OperatorBackend
from ..kv_cache import PagedKVCache
from ..layers import Activation, RMSNorm
from ..rope import RotaryEmbedding
from .activations import gate
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


def why_not(spec: StackSpec, machine: Machine) -> str | None:
    """What this machine or a model lacks for Triton's kernels; of models every feature is known."""
    if machine.device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "runs on GPUs"
    odd = sorted(dim for dim in spec.head_dims if dim & (dim - 1))
    if odd:
        return f"needs a head_dim that is a power of two, the {spec.name}'s is {odd[0]}"
    return None


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

    def begin(self, rows: PlacedRows) -> PlacedRows:
        return rows

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
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm, out_norm: RMSNorm | None
    ) -> tuple[Tensor, Tensor]:
        y_NH = project(x_NI, None)
        if out_norm is not None:
            y_NH = rms_norm(y_NH, out_norm.weight_H, out_norm.eps)
        return add_rms_norm(y_NH, residual_NH, norm.weight_H, norm.eps)

    def gate(self, gate_up_NI: Tensor, activation: Activation) -> Tensor:
        return gate(gate_up_NI, activation)


class _TritonAttention:
    __slots__ = ("_attend", "_heads", "_shape", "_workspace")

    def __init__(self, shape: AttentionShape, attend: PagedAttention, workspace: AttentionWorkspace) -> None:
        self._shape = shape
        self._attend, self._workspace = attend, workspace
        self._heads = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)

    def __call__(self, qkv_NO: Tensor, step: PlacedRows, cache: PagedKVCache, layer: int) -> Tensor:
        shape, group, rope = self._shape, cache.group(layer), self._shape.rope
        qkv_NJD = qkv_NO.unflatten(-1, self._heads)
        k_PSKD, v_PSKD = cache.pages(layer).unbind(2)
        norm_rotate_write(
            qkv_NJD,
            shape.q_norm_D,
            shape.k_norm_D,
            shape.eps,
            rope.cos_TD,
            rope.sin_TD,
            step.positions_N,
            step.kv_slots[group],
            k_PSKD,
            v_PSKD,
        )
        return self._attend(
            qkv_NJD[:, : shape.num_heads],
            k_PSKD,
            v_PSKD,
            step.batches[group],
            shape.scale,
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

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        write_context(
            kv_NO.unflatten(-1, self._shape),
            self._k_norm_LD,
            self._eps,
            rope.cos_TD,
            rope.sin_TD,
            rows.positions_N,
            rows.kv_slots[cache.group(first)],
            cache.planes(first, len(self._k_norm_LD)),
        )
