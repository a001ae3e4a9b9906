"""One pre-norm transformer block over paged K/V: the target's and the drafter's are the same.

Residual and norm travel together: a block takes the residual and its norm, and returns both for the next
one, so that a backend may compute them in one launch with what comes before.

    (x, norm x) --q,k,v--> attention --o--> (x', norm x') --gate,up--> silu, product --down--> (x'', norm x'')

Legend: N rows, H hidden, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .backend import AttentionShape, Backend, Projection
from .kv_cache import PagedKVCache
from .layers import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The products and norms of a block; q, k and v are one product, gate and up another."""

    input_norm: RMSNorm
    qkv: Linear
    o: Projection
    post_norm: RMSNorm
    gate_up: Linear
    down: Projection


class DecoderBlock:
    """One block; holds no state of requests."""

    __slots__ = ("_attention", "_backend", "_weights", "input_norm")

    def __init__(self, backend: Backend, shape: AttentionShape, weights: BlockWeights) -> None:
        self._backend = backend
        self._attention = backend.attention(shape)
        self._weights = weights
        self.input_norm = weights.input_norm

    def __call__(
        self, x_NH: Tensor, normed_NH: Tensor, step: Any, cache: PagedKVCache, layer: int, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The residual behind this block and its norm.

        Args:
            x_NH: the residual; left as it was.
            normed_NH: `input_norm` of it.
            step: what the backend's `begin` made for this pass.
            next_norm: the next block's `input_norm`, or the model's last norm.
        """
        weights, backend = self._weights, self._backend
        attended = self._attention(weights.qkv(normed_NH), step, cache, layer)
        x_NH, normed_NH = backend.residual_norm(weights.o, attended, x_NH, weights.post_norm)
        inner = backend.silu_mul(weights.gate_up(normed_NH))
        return backend.residual_norm(weights.down, inner, x_NH, next_norm)
