"""How a model's blocks are computed: the seam between what a model is and what a machine is good at.

    Backend      what models ask for, at load: a stack of blocks, a norm, the drafter's context writer
      TorchBackend    PyTorch's operators, anywhere           torch_backend.py
      CpuBackend      compiled loops around the products      cpu/backend.py
      CompiledBackend a whole pass in one call, bf16 on a CPU  cpu/backend.py
      TritonBackend   fused kernels, on a GPU                 kernels/backend.py
    Operators    what a stack of blocks is made of where Python drives it (`blocks.py`)

Legend: N rows, H hidden, O outputs, Q query heads, K kv heads, J = Q + 2K, D head dim, L layers, I inner
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .kv_cache import PagedKVCache
from .layers import RMSNorm
from .rope import RotaryEmbedding


class Projection(Protocol):
    """A matrix product with weights: `layers.Linear` or its kin."""

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None, /) -> Tensor:
        """y [N, O] of x, plus the residual if one is given."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        q_norm_D, k_norm_D: weights of the heads' RMSNorm; both None where the model has none.
        eps: of these norms.
        causal, window: as in `eager.attention.paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    causal: bool = True
    window: int | None = None

    def head_norm(self) -> Tensor | None:
        """The norms' weights of the heads of q and k, [Q + K, D]; None where the model has none."""
        if self.q_norm_D is None or self.k_norm_D is None:
            return None
        q_QD, k_KD = self.q_norm_D.expand(self.num_heads, -1), self.k_norm_D.expand(self.num_kv_heads, -1)
        return torch.cat((q_QD, k_KD))


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The products and norms of a block; q, k and v are one product, gate and up another."""

    input_norm: RMSNorm
    qkv: Projection
    o: Projection
    post_norm: RMSNorm
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a pass and their places.

    Attributes:
        positions_N: absolute positions.
        kv_slots_N: where each row's K and V go.
        batch: what the backend wants to know of the step: an `AttentionBatch`, or its kin.
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


class Stack(Protocol):
    """A model's blocks between its embedding and its head."""

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        """Run a step's rows, writing their K/V.

        Args:
            x_NH: input embeddings; may be overwritten.

        Returns:
            normed hidden states [N, H]; taps [N, m, H], or None without taps.
        """
        ...


class Backend(Protocol):
    """See the module's text."""

    @property
    def attention_batch(self) -> Callable[..., Any]:
        """Makes `PlacedRows.batch` of rows whose places the host knows; see `AttentionBatch.build`."""
        ...

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection: ...

    def stack(
        self,
        blocks: Sequence[tuple[AttentionShape, BlockWeights]],
        final_norm: RMSNorm,
        rope: RotaryEmbedding,
        tap_ids: Sequence[int] = (),
    ) -> Stack:
        """The blocks in order and the norm behind the last; taps are 0-based, in the drafter's order."""
        ...

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor: ...

    def context_writer(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> ContextWriter: ...


class Operators(Protocol):
    """What `blocks.BlockStack` calls, layer by layer."""

    def begin(self, rope: RotaryEmbedding, rows: PlacedRows) -> Any:
        """Once per pass: what its layers share."""
        ...

    def attention(self, shape: AttentionShape) -> Attention:
        """Once per layer, at load."""
        ...

    def norm(self, norm: RMSNorm, x_NH: Tensor) -> Tensor: ...

    def residual_norm(
        self, project: Projection, x_NI: Tensor, residual_NH: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The new residual, project(x) + residual, and its norm. The old residual stays as it was."""
        ...

    def silu_mul(self, gate_up_NI: Tensor) -> Tensor: ...
