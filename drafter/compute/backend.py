"""The interface between models and the backends that compute their blocks.

    EagerBackend     PyTorch's operators, on any device; the definition      eager/backend.py
    NumbaBackend     compiled loops around PyTorch's GEMMs                   cpu_numba/backend.py
    FusedCpuBackend  a whole pass in one call, bf16 on a CPU                 cpu_fused/backend.py
    TritonBackend    fused kernels, on a GPU                                 gpu_triton/backend.py

Each of these modules has `why_not(spec, machine)`, which says before a weight is read what it cannot do.

Legend: N rows, H hidden, O outputs, Q query heads, K kv heads, J = Q + 2K, D head dim, L layers, I inner
size, F head dim of values, G page groups; P parts and R rows of a block of a weight; S sides (in, out), T
taps and C groups of channels of a convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checkpoint.quantized_matrix import Matrix, QuantizedMatrix
from .layers.gated_delta_net import DeltaNetShape
from .layers.linear import Activation, Linear, RMSNorm, linear_of_blocks
from .layers.mla import MLALayer
from .layers.moe import Experts, ExpertWeights, Route, RouterWeights
from .layers.rope import RotaryEmbedding
from .memory.kv_cache import PagedKVCache
from .memory.peer_buffers import PeerBuffers
from .memory.recurrent_state_cache import DeviceStateRows, StateRows

Ints = NDArray[np.integer]
Device = torch.device | str

# Features that not every backend supports, as refusals name them.
Feature = Literal[
    "norms after attention and MLP",
    "GELU",
    "norm weights in fp32",
    "layers that rotate differently",
    "normed values",
    "scaled residuals",
    "layers without rotation",
    "gate after attention",
    "norm of whole queries and keys",
    "attention sinks",
    "convolutions around attention and MLP",
    "routed experts",
    "layers whose heads differ",
    "values of another size than keys",
    "keys from the second position on",
    "latent attention",
    "recurrent states",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStackSpec:
    """Requirements of a target or drafter on a backend, known before a weight is read.

    `sizes` are the hidden and inner sizes; `head_dims` are without MLA's rotated part.
    """

    name: str
    sizes: frozenset[int]
    head_dims: frozenset[int]
    features: frozenset[Feature] = frozenset()

    def why_unsupported(self, known: frozenset[Feature]) -> str | None:
        missing = sorted(self.features - known)
        return f"has no {missing[0]}, which the {self.name} needs" if missing else None


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """The device, dtype and layout on which models are computed.

    `num_ranks` are tensor-parallel ranks; `kv_dtype` is that of stored K/V, None for `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    page_size: int
    num_ranks: int
    kv_dtype: torch.dtype | None = None


# The result of a norm, read only by the GEMMs after it: a tensor [N, H], or whatever the backend's own GEMMs
# normalize on load. Any: each backend has its own.
Normed = Any


class Projection(Protocol):
    """A matrix product with weights, as `layers.Linear`; a backend's own also accept its `Normed`."""

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        q_norm_D, k_norm_D: weights of the heads' RMSNorm; both None if the model has none.
        v_norm: values are RMS-normed per head too, without a weight (Gemma 4).
        rope: of queries and keys; None rotates nothing.
        causal, window, sinks_Q, first_key: see `eager.attention.paged_attention`.
        latent: MLA: keys and values are latents, one K/V head of `head_dim`; its first `v_head_dim` are the
            value, and `rope` rotates the rest. The layer then returns [N, Q * `latent.v_dim`].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    rope: RotaryEmbedding | None
    scale: float
    causal: bool = True
    window: int | None = None
    v_norm: bool = False
    sinks_Q: Tensor | None = None
    first_key: int = 0
    latent: MLALayer | None = None

    def head_norm(self) -> Tensor | None:
        if self.q_norm_D is None or self.k_norm_D is None:
            return None
        q_QD, k_KD = self.q_norm_D.expand(self.num_heads, -1), self.k_norm_D.expand(self.num_kv_heads, -1)
        return torch.cat((q_QD, k_KD))


@dataclass(frozen=True, slots=True)
class RankSum:
    """A projection of which each rank computes a part of the result; the parts are summed over ranks.

    Attributes:
        all_reduce: sums the ranks' parts, in place.
        peers: the ranks' memory, through which a backend's kernel can sum few rows; None: there is none.
        project: makes this rank's part; None: the input is the part.
    """

    all_reduce: Callable[[Tensor], Tensor]
    peers: PeerBuffers | None = None
    project: Projection | None = None

    def part(self, x_NK: Tensor) -> Tensor:
        return x_NK if self.project is None else self.project(x_NK)

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        y_NO = self.all_reduce(self.part(x_NK))
        return y_NO if residual_NO is None else y_NO.add_(residual_NO)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """down(activation(first half) * second half of gate_up x); gate and up are one product."""

    gate_up: Projection
    activation: Activation = "silu"
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Routed experts (MoE), and optionally a shared expert, which adds this rank's part, as the experts do.

    Attributes:
        shared_gate: [N, 1]; its sigmoid weighs the shared expert; None: weight 1.
        rank_sum: sums the ranks' parts; None on a single rank.
    """

    route: Route
    experts: Experts
    shared: DenseMLP | None = None
    shared_gate: Projection | None = None
    rank_sum: RankSum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMLP:
    """Sum of the normed outputs of a dense MLP and a routed one; `routed_norm` precedes the experts."""

    dense: DenseMLP
    dense_out_norm: RMSNorm
    routed_norm: RMSNorm
    routed: RoutedExperts
    routed_out_norm: RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """Projections and norms of a block; q, k and v are one projection, as are a delta rule's inputs.

    Attributes:
        qkv_norm: norm of the whole q, k, v projection [N, O], which it may overwrite.
        attention_gate: projection; its sigmoid multiplies attention's output.
        attention_out_norm, mlp_out_norm: norms of the sublayers' outputs before the residual addition.
        scalar: multiplies the whole residual after the block (Gemma 4).
    """

    attention_norm: RMSNorm
    qkv: Projection
    qkv_norm: Callable[[Tensor], Tensor] | None = None
    attention_gate: Projection | None = None
    o: Projection
    attention_out_norm: RMSNorm | None = None
    mlp_norm: RMSNorm
    mlp: DenseMLP | RoutedExperts | ParallelMLP
    mlp_out_norm: RMSNorm | None = None
    scalar: float | None = None


@dataclass(frozen=True, slots=True)
class Convolution:
    """A DFlash2 convolution around one sublayer, defined in `compute/blocks.py`.

    `kernels` maps H -> S * T * C: each row's addition to the base kernels, which are in the model's dtype.
    """

    kernels: Projection
    base_STH: Tensor

    def dynamic(self, normed_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' dynamic kernels [N, T, C] of both sides."""
        sides, taps, _ = self.base_STH.shape
        before, after = self.kernels(normed_NH).unflatten(-1, (sides, taps, -1)).unbind(1)
        return before, after


@dataclass(frozen=True, slots=True)
class ConvolvedBlock:
    shape: AttentionShape
    weights: BlockWeights
    around_attention: Convolution
    around_mlp: Convolution


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a pass and their places in the caches.

    Attributes:
        kv_slots: per page group [N], slots to which each row's K and V are written.
        batches: per page group the result of `Backend.attention_batch`; None for a group without layers.
        states: rows by request, for layers with recurrent states.
    """

    positions_N: Tensor
    kv_slots: tuple[Tensor, ...]
    batches: tuple[Any, ...]
    states: StateRows | DeviceStateRows | None = field(default=None, kw_only=True)

    def padding_owners(self) -> Tensor | None:
        """Return `owners`, negative for padding, where a pass may have padding; else None."""
        return None

    def owners(self) -> Tensor:
        """Return integers [N] for a drafter's block, equal in neighboring rows of the same request."""
        raise NotImplementedError("only a step's rows know their requests")


# How the rows of a layer mix with the rows before them.
MixerShape = AttentionShape | DeltaNetShape


class Attention(Protocol):
    """Head norm, rotation, K/V write and attention of one layer, or a delta rule in its place."""

    def __call__(self, qkv_NO: Tensor, step: Any, cache: PagedKVCache, layer: int, /) -> Tensor:
        """Return [N, Q * F] from q, k and v, which are overwritten.

        `step` is the result of `Backend.begin`, `layer` the index of the layer's K/V or states in the cache.
        """
        ...


class ContextWriter(Protocol):
    """Norm, rotation and write of the drafter's context K/V, for layers that share a page group."""

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        """Write the layers' keys, then values; overwrites `kv_NO`. `first`: the first one's cache index."""
        ...


class Stack(Protocol):
    """A model's blocks between its embedding and its head."""

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        """Run a step's rows and write their K/V; return normed hidden states [N, H] and taps [N, m, H].

        `x_NH`, the input embeddings, may be overwritten. Taps are None without tap ids.
        """
        ...


class Backend(ABC):
    """Makes models' operators for one kind of device. A model asks for them at load.

    Attributes:
        packed_experts: whether `experts` takes packed weights; else they are dequantized first.
        keeps_codes: whether `linear_of_codes` is there; else quantized matrices are dequantized first.
        weight_bytes: bytes of the weights that it has packed so far; None if it packs none.
        num_codes, num_plain: matrices of `linear_of_either` so far, as codes and as numbers.
        expert_reads: int32 [1]: experts' weights read by passes so far, summed over layers, wrapping.
    """

    packed_experts = False
    keeps_codes = False
    weight_bytes: int | None = None
    num_codes = 0
    num_plain = 0
    expert_reads: Tensor | None = None

    @staticmethod
    @abstractmethod
    def attention_batch(
        first_R: Ints,
        rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: Device,
        window: int | None = None,
        tree_paths_ND: Ints | None = None,
    ) -> Any:
        """Return a host-driven step's attention metadata, an element of `PlacedRows.batches`.

        Args:
            first_R: absolute position of each request's first row.
            rows_R: rows of each request, at least 1; they are laid out request after request.
            pages_RP: page ids of each request from position 0 on; columns beyond its length are ignored.
            window: the largest window of this page group's layers; pages before it may be another request's.
            tree_paths_ND: the rows' paths where requests are trees (`draft_trees.py`), for causal layers
                alone; None if all are chains.
        """

    def compact_rows(self, cache: PagedKVCache, source_slots: Tensor, target_slots: Tensor) -> None:
        """Move rows of all layers' K and V to other slots; see `PagedKVCache.compact_rows`."""
        cache.compact_rows(source_slots, target_slots)

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return Linear(weight_OH, bias_O)

    def linear_of_codes(self, weight_OH: QuantizedMatrix, bias_O: Tensor | None = None) -> Projection:
        raise AssertionError("matrices are read as codes for backends that keep them")

    def linear_of_either(self, weight_OH: Matrix, bias_O: Tensor | None = None) -> Projection:
        if isinstance(weight_OH, QuantizedMatrix):
            self.num_codes += 1
            return self.linear_of_codes(weight_OH, bias_O)
        self.num_plain += 1
        return self.linear(weight_OH, bias_O)

    def head(self, weight_VH: Tensor) -> Projection:
        """Return the projection to logits; on GPUs it is not quantized where others are."""
        return self.linear(weight_VH)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Projection:
        """Return a projection with a weight of O = P * L * R outputs in possibly strided blocks of R rows.

        The weight is not copied, except by backends that repack weights.
        """
        return linear_of_blocks(weight_PLRH, bias_O)

    @abstractmethod
    def route(self, weights: RouterWeights) -> Route: ...

    @abstractmethod
    def experts(self, weights: ExpertWeights) -> Experts: ...

    def _count_expert_reads(self, weights: ExpertWeights) -> Tensor:
        if self.expert_reads is None:
            self.expert_reads = torch.zeros(1, dtype=torch.int32, device=weights.device)
        return self.expert_reads

    @abstractmethod
    def stack(
        self,
        blocks: Sequence[tuple[MixerShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int] = (),
    ) -> Stack:
        """Stack blocks and final norm; `tap_ids`: 0-based layers with outputs to return, in this order."""

    @abstractmethod
    def convolved_stack(self, blocks: Sequence[ConvolvedBlock], final_norm: RMSNorm) -> Stack: ...

    @abstractmethod
    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor: ...

    def row_squares(self, x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
        """Return sums of squares of two consecutive parts of a row, fp32 [N, 2], for a norm of q and k.

        A row's bits do not depend on other rows.
        """
        parts = x_NO[:, : sum(widths)].float().square().split(widths, dim=1)
        return torch.stack([part_NP.sum(1) for part_NP in parts], dim=1)

    @abstractmethod
    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter: ...

    @abstractmethod
    def begin(self, rows: PlacedRows) -> Any:
        """Return what the layers of one pass share."""

    @abstractmethod
    def attention(self, shape: AttentionShape) -> Attention: ...

    @abstractmethod
    def delta_net(self, shape: DeltaNetShape) -> Attention: ...

    @abstractmethod
    def residual_norm(
        self,
        project: Projection,
        x_NI: Tensor,
        residual_NH: Tensor,
        norm: RMSNorm,
        out_norm: RMSNorm | None,
        scalar: float | None = None,
    ) -> tuple[Tensor, Normed]:
        """Return the new residual, project(x) + residual, and its norm. The old residual is not changed.

        `out_norm` norms project(x) before the sum; `scalar` multiplies the sum, rounded before and after.
        """

    @abstractmethod
    def gated(self, gate_up: Projection, normed_NH: Normed, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of the projection."""

    @staticmethod
    @abstractmethod
    def convolve(
        x_NH: Tensor,
        dynamic_NTC: Tensor,
        base_TH: Tensor,
        owners_N: Tensor,
        residual_NH: Tensor | None = None,
        /,
    ) -> Tensor: ...

    def as_tensor(self, normed_NH: Normed) -> Tensor:
        return normed_NH
