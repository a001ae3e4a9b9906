"""`TritonBackend`: `EagerBackend`'s operators in fused kernels.

Per layer: four GEMMs, one launch that norms and rotates q and k and writes K/V, one that attends. Manta's own
GEMM kernels (`linear/projections.py`) fuse residual, norm and gate; with PyTorch's GEMMs one launch adds the
residual and norms it (twice), one applies the gate. Routed experts take a projection and a selection
(`moe/topk_routing.py`), then four launches (`moe/moe.py`). Per pass and kind of layers, one launch builds
attention's work list. There is no host synchronization, so a CUDA graph may contain everything.

Legend: N rows, H hidden, O outputs, D head dim, L layers, I inner size, P pages, S page size, Q query heads,
K kv heads, F head dim of values; of a weight P parts and R rows of a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..backend import Attention, ContextWriter, DeviceCapabilities, ModelStackSpec, PlacedRows
from ..block_weights import AttentionShape, Projection, RankSum
from ..blocks import OperatorBackend
from ..checkpoint.packed_codes import PackedCodes
from ..checkpoint.quantized_matrix import (
    GROUP,
    ON_GPUS,
    Matrix,
    QuantizedAtLoad,
    QuantizedMatrix,
    quantize,
)
from ..eager.moe_routing import LayerRouter
from ..layers.gated_delta_net import DeltaNetShape
from ..layers.linear import Activation, BlockLinear, Linear, RMSNorm, linear_of_blocks
from ..layers.mla import MLALayer
from ..layers.moe import Experts, ExpertWeights, Route, RouterWeights
from ..layers.rope import RotaryEmbedding
from ..memory.kv_cache import PagedKVCache
from .attention.attention_tiles import (
    AttentionKind,
    AttentionWorkspace,
    PagedRows,
    WorkList,
    list_work,
    rows_from_host,
)
from .attention.compact_rows import compact_rows
from .attention.mla import TritonLatentAttention
from .attention.mla_prefill_work import Expansion, ExpansionWorkspace, find_expansion
from .attention.norm_rope_kv_write import norm_rotate_write, write_context
from .attention.paged_attention import MAX_HEAD_DIM, verify_attention
from .common.c_compiler import why_not_launch
from .common.element_ops import add_rms_norm, rms_norm, row_squares
from .delta_net.dynamic_convolution import convolve
from .delta_net.gated_delta_net import TritonDeltaNet
from .linear.all_reduce_norm import sum_add_rms_norm
from .linear.fp8_linear import QuantisedWeight, quantised_projection
from .linear.gemm_choice import MeasuredChoice, Ranks, choose_own
from .linear.gemm_tiles import ProductWorkspace
from .linear.packed_codes import for_kernels
from .linear.projections import (
    ChosenProjection,
    GemmChoice,
    LayerProjection,
    OwnProjection,
    PendingNorm,
    TorchProjection,
    as_tensor,
    packed_projection,
)
from .moe.moe import TritonExperts
from .moe.topk_routing import choose


class PagedAttention(Protocol):
    """An attention implementation: `SplitAttention`, or `flash_attention.FlashAttention`."""

    def reserve(self, v_head_dim: int) -> None:
        """Allocate workspaces; called once per layer, at load."""
        ...

    def prepare(self, kind: AttentionKind, rows: PagedRows) -> Any:  # Any: it is handed to `__call__` alone
        """Return what layers of a kind share; called once per pass."""
        ...

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKF: Tensor,
        rows: PagedRows,
        prepared: Any,
        scale: float,
        /,
        *,
        v_scale: float = 1.0,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Attend; see `paged_attention.verify_attention`. `prepared` comes from `prepare`."""
        ...


class SplitAttention:
    """`paged_attention.verify_attention` with its workspaces, one per value size, shared by all layers."""

    def __init__(self, device: torch.device | str, *, batch_invariant: bool = False) -> None:
        self._device, self._batch_invariant = device, batch_invariant
        self._workspaces: dict[int, AttentionWorkspace] = {}

    def reserve(self, v_head_dim: int) -> None:
        if v_head_dim not in self._workspaces:
            self._workspaces[v_head_dim] = AttentionWorkspace(
                v_head_dim, self._device, batch_invariant=self._batch_invariant
            )

    def prepare(self, kind: AttentionKind, rows: PagedRows) -> WorkList:
        return list_work(kind, rows, self._workspaces[kind.v_head_dim])

    __call__ = staticmethod(verify_attention)


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    if machine.device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "runs on GPUs"
    wide = sorted(dim for dim in spec.head_dims if dim > MAX_HEAD_DIM)
    if wide:
        return f"has no head_dim above {MAX_HEAD_DIM}, the {spec.name}'s is {wide[0]}"
    return why_not_launch() if machine.device.type == "cuda" else None


class TritonBackend(OperatorBackend):
    """Makes operators in Triton; GEMMs are the faster of Triton's and PyTorch's.

    Args:
        attend: attention implementation; by default `SplitAttention`.
        batch_invariant: a row's bits do not depend on its batch: GEMMs are Triton's with one tile height,
            attention is as in `AttentionWorkspace`, and MLA stays absorbed.
        quantization: form in which weights of projections are kept that are given in 16 bits, except those
            of heads and routers: e4m3 (`linear/fp8_linear.py`, but for experts), or integers.
        ranks: of the same model, which agree on kernels; None for a single one.
    """

    attention_batch = staticmethod(rows_from_host)
    kept_codes = ON_GPUS

    def __init__(
        self,
        device: torch.device | str,
        attend: PagedAttention | None = None,
        *,
        batch_invariant: bool = False,
        quantization: Literal["fp8"] | QuantizedAtLoad | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._device, self._batch_invariant = torch.device(device), batch_invariant
        self._quantization: Literal["fp8"] | QuantizedAtLoad | None = quantization
        self._attend = attend or SplitAttention(device, batch_invariant=batch_invariant)
        self._choice, self._sums = MeasuredChoice(ranks=ranks), ProductWorkspace(device)
        # Triton's interpreter has no speed that could be measured.
        self._choice_of_codes: GemmChoice = choose_own if self._device.type == "cpu" else self._choice
        self._expansions: dict[Hashable, ExpansionWorkspace] = {}

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> LayerProjection:
        if self._quantization is None:
            return self._plain_linear(weight_OH, bias_O)
        return self.linear_of_blocks(weight_OH[None, None], bias_O)

    def linear_of_codes(self, weight_OH: QuantizedMatrix, bias_O: Tensor | None = None) -> LayerProjection:
        codes = for_kernels(PackedCodes.of(weight_OH.to(self._device)))
        self._count_bytes(codes)
        return packed_projection(
            codes, bias_O, self._sums, self._choice_of_codes, one_tile=self._batch_invariant
        )

    def _count_bytes(self, codes: PackedCodes) -> None:
        self.weight_bytes = (self.weight_bytes or 0) + codes.num_bytes

    def head(self, weight_VH: Matrix) -> LayerProjection:
        assert isinstance(weight_VH, Tensor), "GPUs have no packed vocabulary"
        return self._plain_linear(weight_VH)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> LayerProjection:
        if self._quantization == "fp8":
            return self._quantised_projection(weight_PLRH, bias_O)
        if (kind := self._quantization) is not None and weight_PLRH.shape[3] % GROUP == 0:
            return self.linear_of_codes(quantize(weight_PLRH.flatten(0, 2), kind), bias_O)
        return self._projection(weight_PLRH, bias_O, lambda: linear_of_blocks(weight_PLRH, bias_O))

    def _plain_linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> LayerProjection:
        return self._projection(weight_OH[None, None], bias_O, lambda: Linear(weight_OH, bias_O))

    def _quantised_projection(self, weight_PLRH: Tensor, bias_O: Tensor | None) -> LayerProjection:
        weight = QuantisedWeight.of(weight_PLRH)
        return quantised_projection(
            weight, bias_O, self._sums, self._choice_of_codes, one_tile=self._batch_invariant
        )

    def _projection(
        self, weight_PLRH: Tensor, bias_O: Tensor | None, make_linear: Callable[[], Linear | BlockLinear]
    ) -> LayerProjection:
        if self._batch_invariant:
            return OwnProjection(weight_PLRH, bias_O, self._sums, one_tile=True)
        other = TorchProjection(make_linear())
        if self._device.type == "cpu":  # Triton's interpreter: slow, and with no speed to measure
            return other
        return ChosenProjection(OwnProjection(weight_PLRH, bias_O, self._sums), other, self._choice)

    def begin(self, rows: PlacedRows) -> _Pass:
        return _Pass(rows, self._attend)

    def compact_rows(self, cache: PagedKVCache, source_slots: Tensor, target_slots: Tensor) -> None:
        compact_rows(cache, source_slots, target_slots)

    def attention(self, shape: AttentionShape) -> Attention:
        self._attend.reserve(shape.v_head_dim)
        if shape.latent is not None:
            workspace = self._expansion_workspace(shape, shape.latent)
            return TritonLatentAttention(shape, workspace, batch_invariant=self._batch_invariant)
        return _TritonAttention(shape, self._attend)

    def _expansion_workspace(self, shape: AttentionShape, parts: MLALayer) -> ExpansionWorkspace | None:
        """Return the workspace that layers of equal shape share; None if prompts stay absorbed."""
        minimum = parts.min_expanded
        sees_all = shape.causal and shape.window is None and not shape.first_key
        if self._batch_invariant or not sees_all or minimum is None:
            return None
        key = parts.kv_up_JUC.shape, shape.head_dim, parts.kv_up_JUC.dtype
        if key not in self._expansions:
            self._expansions[key] = ExpansionWorkspace(parts, shape.head_dim, minimum)
        return self._expansions[key]

    def delta_net(self, shape: DeltaNetShape) -> Attention:
        return TritonDeltaNet(shape, by_rows=self._batch_invariant)

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter:
        return _TritonContextWriter(k_norm_LD.contiguous(), eps, num_kv_heads)

    def route(self, weights: RouterWeights) -> Route:
        project = self._plain_linear(weights.weight_EH, weights.bias_E)
        return LayerRouter(weights, project, self.norm, choose)

    def experts(self, weights: ExpertWeights) -> Experts:
        if self._quantization in ("int8", "int4"):
            weights = weights.quantized(self._quantization)
        for weight in (weights.gate_up, weights.down):
            if isinstance(weight, PackedCodes):
                self._count_bytes(weight)
        return TritonExperts(weights, self._count_experts(weights), one_height=self._batch_invariant)

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor:
        return rms_norm(x_NH, norm.weight_H, norm.eps)

    def row_squares(self, x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
        return row_squares(x_NO, widths)

    def residual_norm(
        self,
        project: Projection,
        x_NI: Tensor,
        residual_NH: Tensor,
        norm: RMSNorm,
        out_norm: RMSNorm | None,
        scalar: float | None = None,
    ) -> tuple[Tensor, Tensor | PendingNorm]:
        if out_norm is None and scalar is None and isinstance(project, LayerProjection):
            return project.added(x_NI, residual_NH, norm)
        if out_norm is None and isinstance(project, RankSum) and (peers := project.peers) is not None:
            part_NH = project.part(x_NI)
            if peers.takes(part_NH):
                return sum_add_rms_norm(part_NH, peers, residual_NH, norm.weight_H, norm.eps, scalar)
            y_NH = project.all_reduce(part_NH)
        else:
            y_NH = project(x_NI, None)  # possibly all-reduced over ranks before anything is added
        if out_norm is not None:
            y_NH = rms_norm(y_NH, out_norm.weight_H, out_norm.eps)
        return add_rms_norm(y_NH, residual_NH, norm.weight_H, norm.eps, scalar)

    def gated(self, gate_up: Projection, normed_NH: Tensor | PendingNorm, activation: Activation) -> Tensor:
        assert isinstance(gate_up, LayerProjection), "made by this backend, split between ranks or not"
        return gate_up.gated(normed_NH, activation)

    convolve = staticmethod(convolve)

    def as_tensor(self, normed_NH: Tensor | PendingNorm) -> Tensor:
        return as_tensor(normed_NH)


class _Pass:
    """A pass's rows, and attention's preparations and expansions, computed on first use."""

    __slots__ = ("_attend", "_expansions", "_prepared", "rows")

    def __init__(self, rows: PlacedRows, attend: PagedAttention) -> None:
        self.rows = rows
        self._attend = attend
        self._prepared: dict[tuple[int, AttentionKind], Any] = {}  # by page group and kind
        self._expansions: dict[tuple[int, ExpansionWorkspace], Expansion | None] = {}

    def prepared(self, group: int, kind: AttentionKind) -> Any:
        key = group, kind
        if key not in self._prepared:
            self._prepared[key] = self._attend.prepare(kind, self.rows.batches[group])
        return self._prepared[key]

    def expansion(self, group: int, workspace: ExpansionWorkspace) -> Expansion | None:
        key = group, workspace
        if key not in self._expansions:
            self._expansions[key] = find_expansion(self.rows.batches[group], workspace)
        return self._expansions[key]


class _TritonAttention:
    __slots__ = ("_attend", "_q_size", "_shape")

    def __init__(self, shape: AttentionShape, attend: PagedAttention) -> None:
        self._shape, self._attend = shape, attend
        self._q_size = shape.num_heads * shape.head_dim

    def __call__(self, qkv_NO: Tensor, step: _Pass, cache: PagedKVCache, layer: int) -> Tensor:
        shape, rows, group, rope = self._shape, step.rows, cache.group(layer), self._shape.rope
        tables = (None, None) if rope is None else (rope.cos_TD, rope.sin_TD)
        k_PSKD, v_PSKF = cache.heads(layer)
        scales = cache.scales(layer)
        norm_rotate_write(
            qkv_NO,
            shape.q_norm_D,
            shape.k_norm_D,
            shape.eps,
            *tables,
            rows.positions_N,
            rows.kv_slots[group],
            k_PSKD,
            v_PSKF,
            v_norm=shape.v_norm,
            scales=scales,
        )
        kind = AttentionKind(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            dtype=qkv_NO.dtype,
            page_size=cache.page_size,
            causal=shape.causal,
            window=shape.window,
            first_key=shape.first_key,
        )
        prepared = step.prepared(group, kind)
        q_NQD = qkv_NO[:, : self._q_size].unflatten(-1, (shape.num_heads, shape.head_dim))
        batch = rows.batches[group]
        return self._attend(
            q_NQD,
            k_PSKD,
            v_PSKF,
            batch,
            prepared,
            shape.scale * scales.k,
            v_scale=scales.v,
            sinks_Q=shape.sinks_Q,
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
            cache.scales_of(first, len(self._k_norm_LD)),
        )
