"""The interface between models and the backends that compute their blocks.

    EagerBackend     PyTorch's operators, on any device; the definition      eager/backend.py
    NumbaBackend     compiled loops around PyTorch's GEMMs                   cpu_numba/backend.py
    FusedCpuBackend  a whole pass in one call, bf16 on a CPU                 cpu_fused/backend.py
    TritonBackend    fused kernels, on a GPU                                 gpu_triton/backend.py

Each of these modules has `why_not(spec, machine)`, which says before a weight is read what it cannot do.

What a block is made of is in `block_weights.py`.

Legend: N rows, H hidden, O outputs, Q query heads, K kv heads, D head dim, L layers, I inner size, F head dim
of values, G page groups; P parts and R rows of a block of a weight; T taps and C groups of channels of a
convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .block_weights import (
    AttentionShape,
    BlockWeights,
    ConvolvedBlock,
    MixerShape,
    Normed,
    Projection,
)
from .checkpoint.packed_codes import PackedCodes
from .checkpoint.quantized_matrix import Code, JoinedRows, Matrix, QuantizedMatrix
from .layers.gated_delta_net import DeltaNetShape
from .layers.linear import Activation, Linear, RMSNorm, linear_of_blocks
from .layers.moe import Experts, ExpertWeights, Route, RouterWeights
from .layers.rope import RotaryEmbedding
from .memory.kv_cache import PagedKVCache
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
        packs_vocabulary: whether `head` and `embedding` take codes.
        kept_codes: kinds that `linear_of_codes` and `experts` take; other matrices are dequantized first.
        weight_bytes: bytes of the weights that it has packed so far; None if it packs none.
        num_codes, num_plain: matrices of `linear_of_either` so far, as codes and as numbers.
        num_expert_codes, num_expert_plain: products of layers' experts so far, as codes and as numbers.
        expert_reads: int32 [1]: experts' weights read by passes so far, summed over layers, wrapping.
    """

    packs_vocabulary = False
    kept_codes: frozenset[Code] = frozenset()
    weight_bytes: int | None = None
    num_codes = 0
    num_plain = 0
    num_expert_codes = 0
    num_expert_plain = 0
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
        paths_ND: Ints | None = None,
    ) -> Any:
        """Return a host-driven step's attention metadata, an element of `PlacedRows.batches`.

        Args:
            first_R: absolute position of each request's first row.
            rows_R: rows of each request, at least 1; they are laid out request after request.
            pages_RP: page ids of each request from position 0 on; columns beyond its length are ignored.
            window: the largest window of this page group's layers; pages before it may be another request's.
            paths_ND: the rows' paths where requests are trees (`draft_trees.py`), for causal layers
                alone; None if all are chains.
        """

    def compact_rows(self, cache: PagedKVCache, source_slots: Tensor, target_slots: Tensor) -> None:
        """Move rows of all layers' K and V to other slots; see `PagedKVCache.compact_rows`."""
        cache.compact_rows(source_slots, target_slots)

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        return Linear(weight_OH, bias_O)

    def linear_of_codes(self, weight_OH: QuantizedMatrix, bias_O: Tensor | None = None) -> Projection:
        raise AssertionError("matrices are read as codes for backends that keep them")

    def linear_of_either(self, weight_OH: Matrix | JoinedRows, bias_O: Tensor | None = None) -> Projection:
        if isinstance(weight_OH, JoinedRows):
            return self._linear_of_rows(weight_OH, bias_O)
        if isinstance(weight_OH, QuantizedMatrix):
            self.num_codes += 1
        else:
            self.num_plain += 1
        return self._linear_of(weight_OH, bias_O)

    def _linear_of_rows(self, weight_OH: JoinedRows, bias_O: Tensor | None) -> Projection:
        """Return the product with rows of several forms; by default as numbers."""
        self.num_plain += 1
        return self.linear(weight_OH.plain(), bias_O)

    def _linear_of(self, weight_OH: Matrix, bias_O: Tensor | None) -> Projection:
        if isinstance(weight_OH, QuantizedMatrix):
            return self.linear_of_codes(weight_OH, bias_O)
        return self.linear(weight_OH, bias_O)

    def head(self, weight_VH: Matrix) -> Projection:
        """Return the projection to logits; on GPUs it is not quantized where others are."""
        return self._linear_of(weight_VH, None)

    def embedding(self, weight_VH: Matrix, tied: Projection | None = None) -> Callable[[Tensor], Tensor]:
        """Return the look-up of rows [N, H] by ids; `tied`: the head of the same weight, if it is one."""
        assert isinstance(weight_VH, Tensor), "a vocabulary is read as codes where `packs_vocabulary`"
        return partial(weight_VH.index_select, 0)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> Projection:
        """Return a projection with a weight of O = P * L * R outputs in possibly strided blocks of R rows.

        The weight is not copied, except by backends that repack weights.
        """
        return linear_of_blocks(weight_PLRH, bias_O)

    @abstractmethod
    def route(self, weights: RouterWeights) -> Route: ...

    @abstractmethod
    def experts(self, weights: ExpertWeights) -> Experts: ...

    def _count_experts(self, weights: ExpertWeights) -> Tensor:
        """Count a layer's products, and return the counter of reads."""
        for weight in (weights.gate_up, weights.down):
            if isinstance(weight, PackedCodes):
                self.num_expert_codes += 1
            else:
                self.num_expert_plain += 1
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
