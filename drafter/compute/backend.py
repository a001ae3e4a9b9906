"""How a model's blocks are computed: the interface between models and the machines that run them.

    Backend          what models ask for at load: a stack of blocks, a norm, the drafter's context writer; and
                     the operators of which `blocks/transformer_block.py` makes a stack that Python drives
      TorchBackend     PyTorch's operators, on any device; the definition      eager/backend.py
      NumbaBackend     compiled loops around PyTorch's products                cpu_numba/backend.py
      FusedCpuBackend  a whole pass in one call, bf16 on a CPU                 cpu_fused/backend.py
      TritonBackend    fused kernels, on a GPU                                 gpu_triton/backend.py
    ModelStackSpec, DeviceCapabilities    what a backend's `why_not(spec, machine)` gets; it says what
                     the backend lacks, before one is chosen

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

from .layers.gated_delta_net import DeltaNetShape
from .layers.linear import Activation, Linear, RMSNorm, linear_of_blocks
from .layers.mla import MLALayer
from .layers.moe import Experts, ExpertWeights, Route, RouterWeights
from .layers.rope import RotaryEmbedding
from .memory.kv_cache import PagedKVCache
from .memory.recurrent_state_cache import DeviceStateRows, StateRows

Ints = NDArray[np.integer]

# Features that not every backend computes, as its refusal names them.
Feature = Literal[
    "norms behind attention and MLP",
    "GELU",
    "norm weights in fp32",
    "layers that rotate differently",
    "normed values",
    "scaled residuals",
    "layers without rotation",
    "gate behind attention",
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
    """What a target or a drafter needs of a backend, known before a weight is read.

    Attributes:
        name: "target" or "drafter", for messages.
        sizes: the sizes of its hidden state and of its MLPs' inner states.
        head_dims: the head dimensions of its attention; of latents without the rotated part.
        features: what it has beyond a plain block.
    """

    name: str
    sizes: frozenset[int]
    head_dims: frozenset[int]
    features: frozenset[Feature] = frozenset()

    def lacking(self, known: frozenset[Feature]) -> str | None:
        """Return why a backend that knows these features refuses the model; None if it knows all it needs."""
        missing = sorted(self.features - known)
        return f"has no {missing[0]}, which the {self.name} needs" if missing else None


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """Where and how models are computed.

    Attributes:
        page_size: tokens per K/V page.
        num_ranks: tensor-parallel ranks of the target.
    """

    device: torch.device
    dtype: torch.dtype
    page_size: int
    num_ranks: int


# The result of a norm, which only the products behind it read: a tensor [N, H], or whatever a backend's own
# products turn into one as they read it. Any: each backend has its own.
Normed = Any


class Projection(Protocol):
    """A matrix product with weights, as `layers.Linear`; a backend's own products also take its `Normed`."""

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None, /) -> Tensor:
        """Return y [N, O] of x [N, K], plus the residual if one is given."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        head_dim, v_head_dim: of queries and keys; of values, no more than that.
        q_norm_D, k_norm_D: weights of the heads' RMSNorm; both None where the model has none.
        v_norm: values are RMS-normed per head too, without a weight (Gemma 4).
        eps: of these norms.
        rope: of queries and keys; None rotates nothing.
        scale: of scores.
        causal, window: as in `eager.attention.paged_attention`.
        sinks_Q: fp32, likewise; None where heads have none.
        first_key: rows see no keys before this position, but their own (EAGLE-3's first position has none).
        latent: keys and values are latents: one K/V head of `head_dim`, of which the first `v_head_dim` are
            the value, and `rope` is of the rest. The layer then makes [N, Q * `latent.v_dim`].
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
        """Return the norms' weights of the heads of q and k, [Q + K, D]; None where the model has none."""
        if self.q_norm_D is None or self.k_norm_D is None:
            return None
        q_QD, k_KD = self.q_norm_D.expand(self.num_heads, -1), self.k_norm_D.expand(self.num_kv_heads, -1)
        return torch.cat((q_QD, k_KD))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """down(activation(first half) * second half of gate_up x); gate and up are one product."""

    gate_up: Projection
    activation: Activation = "silu"
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """A few of many experts for each row, and perhaps one that all rows share.

    Attributes:
        route: chooses the experts of each row.
        shared: the shared expert; its result is this rank's part, as the experts' are.
        shared_gate: [N, 1], whose sigmoid weighs the shared expert; None: it counts whole.
        all_reduce: sums the ranks' parts, in place; None where one rank has everything.
    """

    route: Route
    experts: Experts
    shared: DenseMLP | None = None
    shared_gate: Projection | None = None
    all_reduce: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMLP:
    """A dense MLP and a routed one of the same residual, each normed behind, and added.

    Attributes:
        routed_norm: before the experts; the dense one's is the block's `mlp_norm`.
    """

    dense: DenseMLP
    dense_out_norm: RMSNorm
    routed_norm: RMSNorm
    routed: RoutedExperts
    routed_out_norm: RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """The products and norms of a block; q, k and v are one product, as is what a delta rule takes in.

    Attributes:
        attention_norm, mlp_norm: before attention and MLP.
        qkv_norm: of the product [N, O] before heads are told apart, which it may overwrite; None where the
            model has none.
        attention_gate: product whose sigmoid multiplies what is attended; None likewise.
        attention_out_norm, mlp_out_norm: of what they add to the residual; None where it is added as it is.
        mlp: what is behind attention.
        scalar: multiplies the whole residual behind the block (Gemma 4); None leaves it as it is.
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
    """DFlash2's, around one sublayer: `compute/eager/dynamic_convolution.py` says what it means.

    Attributes:
        kernels: H -> S * T * C, what each row adds to the base kernels.
        base_STH: in the model's dtype.
    """

    kernels: Projection
    base_STH: Tensor

    def dynamic(self, normed_NH: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' own kernels [N, T, C] of both sides."""
        sides, taps, _ = self.base_STH.shape
        before, after = self.kernels(normed_NH).unflatten(-1, (sides, taps, -1)).unbind(1)
        return before, after


@dataclass(frozen=True, slots=True)
class ConvolvedBlock:
    """A block's plain parts and the convolutions around them (`drafter/compute/blocks/dflash2_block.py`)."""

    shape: AttentionShape
    weights: BlockWeights
    around_attention: Convolution
    around_mlp: Convolution


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a pass and their places in the caches.

    Attributes:
        positions_N: absolute positions.
        kv_slots: per page group [N], where each row's K and V go.
        batches: per page group, what the backend's `attention_batch` made of the step; None where the model
            has no layers in the group.
        states: which requests' rows they are, for layers with states; None without such layers.
    """

    positions_N: Tensor
    kv_slots: tuple[Tensor, ...]
    batches: tuple[Any, ...]
    states: StateRows | DeviceStateRows | None = field(default=None, kw_only=True)

    def owners(self) -> Tensor:
        """Return integers [N] for a drafter's block, equal in neighboring rows of the same request."""
        raise NotImplementedError("only a step's rows know their requests")


# How the rows of a layer read the rows before them.
MixerShape = AttentionShape | DeltaNetShape


class Attention(Protocol):
    """The head norm, rotation, K/V write and attention of one layer, or a delta rule in its place."""

    def __call__(self, qkv_NO: Tensor, step: Any, cache: PagedKVCache, layer: int, /) -> Tensor:
        """Return [N, Q * F] from the layer's q, k and v; `step` is what `begin` made. `qkv` is overwritten.

        Args:
            layer: its number among the layers of its kind, of which the cache has K/V or states.
        """
        ...


class ContextWriter(Protocol):
    """The norm, rotation and write of the drafter's context K/V, for layers that share a page group."""

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        """Write `kv_NO`: the layers' keys, then their values. It is overwritten.

        Args:
            first: the number of the first of these layers in the cache; the others follow it.
        """
        ...


class Stack(Protocol):
    """A model's blocks between its embedding and its head."""

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        """Run the rows of a step and write their K/V.

        Args:
            x_NH: input embeddings; may be overwritten.

        Returns:
            normed hidden states [N, H]; taps [N, m, H], or None without taps.
        """
        ...


class Backend(ABC):
    """Computes models' operators on one kind of device. A model asks for them at load.

    Attributes:
        packed_experts: whether `experts` takes packed weights; else they are dequantized first.
        expert_reads: int32 [1] on the experts' device: how many experts' weights passes have read so far,
            summed over layers, in a count that wraps. None while there are no experts.
    """

    packed_experts = False
    expert_reads: Tensor | None = None

    @staticmethod
    @abstractmethod
    def attention_batch(
        first_position_R: Ints,
        num_rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: torch.device | str,
        window: int | None = None,
    ) -> Any:
        """Return an element of `PlacedRows.batches` where the host knows the rows: an `AttentionBatch`, or
        what this backend has in its place.

        Args:
            first_position_R: absolute position of each request's first row.
            num_rows_R: rows of each request, at least 1; they are laid out request after request.
            pages_RP: page ids of each request from position 0 on; columns beyond its length are ignored.
            window: the largest of the layers of this page group; pages behind it may be another request's.
        """

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return Linear(weight_OH, bias_O)

    def head(self, weight_VH: Tensor) -> Projection:
        """Return the product that makes logits; it is not quantized where others are."""
        return self.linear(weight_VH)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Projection:
        """Return the product with a weight of O = P * L * R outputs whose blocks of R rows may lie apart.

        It is read where it lies, except by backends that lay out weights anew.
        """
        return linear_of_blocks(weight_PLRH, bias_O)

    @abstractmethod
    def route(self, weights: RouterWeights) -> Route:
        """Make a layer's router, once, at load."""

    @abstractmethod
    def experts(self, weights: ExpertWeights) -> Experts:
        """Lay out a rank's experts of a layer, once, at load."""

    def _count_expert_reads(self, weights: ExpertWeights) -> Tensor:
        """Return where a layer's experts count what they read: `expert_reads`."""
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
        """Make a stack of the blocks in order and the norm behind the last.

        Args:
            tap_ids: 0-based layers whose outputs are returned, in the drafter's order.
        """

    @abstractmethod
    def convolved_stack(self, blocks: Sequence[ConvolvedBlock], final_norm: RMSNorm) -> Stack:
        """Make a stack of blocks with convolutions."""

    @abstractmethod
    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor: ...

    def row_squares(self, x_NO: Tensor, widths: tuple[int, int]) -> Tensor:
        """Return sums of squares, fp32 [N, 2], of the first elements of each row and of those behind them.

        A norm of whole queries and keys begins with them. A row's bits do not depend on other rows.
        """
        parts = x_NO[:, : sum(widths)].float().square().split(widths, dim=1)
        return torch.stack([part_NP.sum(1) for part_NP in parts], dim=1)

    @abstractmethod
    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter: ...

    @abstractmethod
    def begin(self, rows: PlacedRows) -> Any:
        """Return what the layers of one pass share."""

    @abstractmethod
    def attention(self, shape: AttentionShape) -> Attention:
        """Make a layer's attention, once, at load."""

    @abstractmethod
    def delta_net(self, shape: DeltaNetShape) -> Attention:
        """Make the delta rule of a layer with states, once, at load."""

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

        Args:
            out_norm: norms project(x) before it is added.
            scalar: multiplies the sum, which is rounded before and after.
        """

    @abstractmethod
    def gated(self, gate_up: Projection, normed_NH: Normed, activation: Activation) -> Tensor:
        """Return activation(first half) * second half of the product."""

    @staticmethod
    @abstractmethod
    def convolve(
        x_NH: Tensor,
        dynamic_NTC: Tensor,
        base_TH: Tensor,
        owners_N: Tensor,
        residual_NH: Tensor | None = None,
        /,
    ) -> Tensor:
        """See `eager.convolution.convolve`."""

    def as_tensor(self, normed_NH: Normed) -> Tensor:
        """Return a norm's result as a tensor [N, H], for readers that are no products."""
        return normed_NH
