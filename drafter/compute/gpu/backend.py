"""A layer's small operations in fused kernels: what `TritonBackend` offers is what `TorchBackend` means.

Per layer: four products, one launch that norms and rotates q and k and writes K/V, one or two that attend.
Where products are ours (`projections.py`) they add residuals, norm and gate by themselves; where they are
PyTorch's, one launch adds the residual and norms it (twice), one makes the gated product. Nothing asks the
host for a value: a CUDA graph may hold it all. Chosen at load (`actors/targets/loading/operators.py`).

Legend: N rows, H hidden, O outputs, D head dim, L layers, I inner size; P parts and R rows of a block of a
weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..backend import Attention, AttentionShape, ContextWriter, Machine, PlacedRows, Projection, StackSpec
from ..blocks import OperatorBackend
from ..kv_cache import PagedKVCache
from ..layers import Activation, BlockLinear, Linear, RMSNorm, linear_of_blocks
from ..rope import RotaryEmbedding
from .attention import verify_attention
from .choice import MeasuredChoice
from .norms import add_rms_norm, rms_norm
from .product_tiles import ProductWorkspace
from .projections import (
    ChosenProjection,
    LayerProjection,
    OwnProjection,
    PendingNorm,
    TorchProjection,
    as_tensor,
)
from .tiles import MAX_PARTIALS, AttentionWorkspace, PagedRows, invariant_partials, rows_from_host
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
    """See the module's text. On a GPU a product is whosever is faster; in the interpreter PyTorch's.

    Args:
        device: of the workspaces.
        attend: what attends.
        invariant_rows: most rows of a step in which a row's bits must not depend on its batch: products are
            ours for any number of rows, in tiles of one height, and attention is cut by position. None is
            not batch-invariant, and faster.
    """

    attention_batch = staticmethod(rows_from_host)

    def __init__(
        self,
        device: torch.device | str,
        attend: PagedAttention = verify_attention,
        *,
        invariant_rows: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._attend = attend
        self._invariant_rows = invariant_rows
        self._workspaces: dict[tuple[int, int], AttentionWorkspace] = {}  # by heads; layers take turns
        self._choice = MeasuredChoice()
        self._sums = ProductWorkspace(device)

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> LayerProjection:
        return self._projection(weight_OH[None, None], bias_O, lambda: Linear(weight_OH, bias_O))

    def linear_of_blocks(self, weight_PLRH: Tensor) -> LayerProjection:
        return self._projection(weight_PLRH, None, lambda: linear_of_blocks(weight_PLRH))

    def _projection(
        self,
        weight_PLRH: Tensor,
        bias_O: Tensor | None,
        make_linear: Callable[[], Linear | BlockLinear],
    ) -> LayerProjection:
        if self._invariant_rows is not None:
            return OwnProjection(weight_PLRH, bias_O, self._sums, one_tile=True)
        other = TorchProjection(make_linear())
        if self._device.type == "cpu":
            return other
        return ChosenProjection(OwnProjection(weight_PLRH, bias_O, self._sums), other, self._choice)

    def begin(self, rows: PlacedRows) -> PlacedRows:
        return rows

    def attention(self, shape: AttentionShape) -> Attention:
        heads = (shape.num_heads, shape.head_dim)
        workspace = self._workspaces.get(heads)
        if workspace is None:
            rows = self._invariant_rows
            most = MAX_PARTIALS if rows is None else invariant_partials(rows, shape.num_heads)
            workspace = AttentionWorkspace(
                most, shape.head_dim, self._device, batch_invariant=rows is not None
            )
            self._workspaces[heads] = workspace
        return _TritonAttention(shape, self._attend, workspace)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _TritonContextWriter(k_norm_LD.contiguous(), eps, num_kv_heads)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return rms_norm(x_NH, norm.weight_H, norm.eps)

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm, out_norm: RMSNorm | None
    ) -> tuple[Tensor, Tensor | PendingNorm]:
        if out_norm is None and isinstance(project, LayerProjection):
            return project.added(x_NI, residual_NH, norm)
        y_NH = project(x_NI, None)  # summed over ranks, perhaps, before anything is added
        if out_norm is not None:
            y_NH = rms_norm(y_NH, out_norm.weight_H, out_norm.eps)
        return add_rms_norm(y_NH, residual_NH, norm.weight_H, norm.eps)

    def gated(self, gate_up: Projection, normed_NH: Tensor | PendingNorm, activation: Activation) -> Tensor:
        assert isinstance(gate_up, LayerProjection), "made by this backend, split between ranks or not"
        return gate_up.gated(normed_NH, activation)

    def as_tensor(self, normed_NH: Tensor | PendingNorm) -> Tensor:
        return as_tensor(normed_NH)


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
