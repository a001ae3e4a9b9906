"""The shapes and weights of a model's blocks, as models give them to a backend.

Made by `actors/targets/model/decoder.py` and `drafter/dflash/weights.py`; read by `blocks.py` and backends.

Legend: N rows, H hidden, K inputs, O outputs, Q query heads, D head dim, F head dim of values; S sides (in,
out), T taps and C groups of channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .layers.gated_delta_net import DeltaNetShape
from .layers.linear import Activation, RMSNorm
from .layers.mla import MLALayer
from .layers.moe import Experts, Route
from .layers.rope import RotaryEmbedding
from .memory.peer_buffers import PeerBuffers

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


# How the rows of a layer mix with the rows before them.
MixerShape = AttentionShape | DeltaNetShape
