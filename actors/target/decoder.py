"""The target: a pre-norm decoder over paged K/V, one implementation for every family.

Stateless: requests' K/V are in the cache it is given. Written for few framework calls per layer, since at
batch 1 those are the cost: q, k and v are one product, gate and up another, residuals are added by the
products. Called by `runner.py`; the drafter borrows its embedding and head.

    x [N, H] --norm--> q,k,v of J heads --head norm (Qwen3)--> rope --pages--> attention --o (+ x)-->
             --norm--> gate,up --silu, product--> down (+ x)--> x of the next block, and a tap of this one

Legend: N rows, X sampled rows, H hidden, m taps, Q query heads, K kv heads, J = Q + 2K, D head dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...drafter.attention import AttentionBatch, paged_attention
from ...drafter.features import stack_taps
from ...drafter.kv_cache import PagedKVCache
from ...drafter.layers import HeadNorm, Linear, RMSNorm, RotaryEmbedding, Rotation, silu_mul
from ...drafter.states import StepRows
from .config import TargetConfig
from .parallel import Communicator, RowLinear, Sharding, VocabEmbedding, VocabHead
from .weights import LayerWeights, TargetWeights


class Decoder:
    """One rank's part of a target.

    Args:
        weights: where the slices come from; read here, layer by layer.
        tap_ids: 0-based blocks whose outputs the drafter wants, in its order; may be empty.
        max_positions: positions that may occur.
    """

    def __init__(
        self,
        weights: TargetWeights,
        tap_ids: Sequence[int],
        max_positions: int,
        communicator: Communicator,
    ) -> None:
        config, sharding = weights.config, weights.sharding
        self.config = config
        self._sharding = sharding
        self._tap_ids = tuple(tap_ids)
        embedding_UH = weights.embedding()
        self.dtype, self.device = embedding_UH.dtype, embedding_UH.device
        head_UH = embedding_UH if config.tied_head else weights.head()
        self._embedding = VocabEmbedding(embedding_UH, sharding, communicator)
        self._head = VocabHead(head_UH, config.vocab_size, communicator)
        self._layers = [
            _Layer(config, sharding, weights.layer(i), window, communicator)
            for i, window in enumerate(config.windows)
        ]
        self._final_norm = RMSNorm(weights.final_norm(), config.rms_norm_eps)
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Pages for this rank's K/V heads."""
        return PagedKVCache(
            self.config.num_layers,
            num_pages,
            page_size,
            self._sharding.num_kv_heads,
            self.config.head_dim,
            self.dtype,
            self.device,
        )

    def page_bytes(self, page_size: int) -> int:
        """Memory of one page of `new_cache`."""
        c = self.config
        return PagedKVCache.bytes_per_page(
            c.num_layers, page_size, self._sharding.num_kv_heads, c.head_dim, self.dtype
        )

    def embed(self, token_ids_N: Tensor) -> Tensor:
        """Input embeddings [N, H]."""
        return self._embedding(token_ids_N)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The head [N, V] on states that are normed already."""
        return self._head(hidden_NH)

    def forward(self, rows: StepRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        """Run a step's rows, writing their K/V.

        Returns:
            normed hidden states [X, H] of the sampled rows; taps [N, m, H] of all rows, or None without taps.
        """
        x_NH = self._embedding(rows.token_ids_N)
        rotation = self._rope.at(rows.positions_N)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            x_NH = layer(x_NH, rotation, rows.kv_slots_N, rows.batch, cache, i)
            if i in self._tap_ids:
                tapped[i] = x_NH
        taps_NmH = stack_taps([tapped[i] for i in self._tap_ids]) if tapped else None
        return self._final_norm(x_NH.index_select(0, rows.sampled_X)), taps_NmH


class _Layer:
    """One block."""

    __slots__ = (
        "_down",
        "_gate_up",
        "_head_norm",
        "_input_norm",
        "_num_kv",
        "_num_q",
        "_o",
        "_post_norm",
        "_qkv",
        "_scale",
        "_shape",
        "_window",
    )

    def __init__(
        self,
        config: TargetConfig,
        sharding: Sharding,
        weights: LayerWeights,
        window: int | None,
        communicator: Communicator,
    ) -> None:
        eps = config.rms_norm_eps
        self._num_q, self._num_kv = sharding.num_heads, sharding.num_kv_heads
        self._input_norm = RMSNorm(weights.input_norm_H, eps)
        self._post_norm = RMSNorm(weights.post_norm_H, eps)
        self._qkv = Linear(weights.qkv_OH, weights.qkv_bias_O)
        self._o = RowLinear(weights.o_HO, weights.o_bias_H, communicator)
        self._gate_up = Linear(weights.gate_up_IH, weights.gate_up_bias_I)
        self._down = RowLinear(weights.down_HI, weights.down_bias_H, communicator)
        self._head_norm = self._make_head_norm(weights, eps)
        self._shape = (self._num_q + 2 * self._num_kv, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._window = window

    def _make_head_norm(self, weights: LayerWeights, eps: float) -> HeadNorm | None:
        if weights.q_norm_D is None or weights.k_norm_D is None:
            return None
        q_JD, k_JD = weights.q_norm_D.expand(self._num_q, -1), weights.k_norm_D.expand(self._num_kv, -1)
        return HeadNorm(torch.cat((q_JD, k_JD)), eps)

    def __call__(
        self,
        x_NH: Tensor,
        rotation: Rotation,
        kv_slots_N: Tensor,
        batch: AttentionBatch,
        cache: PagedKVCache,
        layer: int,
    ) -> Tensor:
        num_q, num_kv = self._num_q, self._num_kv
        qkv_NJD = self._qkv(self._input_norm(x_NH)).unflatten(-1, self._shape)
        qk = qkv_NJD[:, : num_q + num_kv]
        rotation.rotate(qk if self._head_norm is None else self._head_norm(qk), out_NJD=qk)
        cache.write(layer, kv_slots_N, qkv_NJD[:, num_q:].unflatten(1, (2, num_kv)))
        attended = paged_attention(
            qkv_NJD[:, :num_q], cache, layer, batch, self._scale, causal=True, window=self._window
        )
        x_NH = self._o(attended, x_NH)
        return self._down(silu_mul(self._gate_up(self._post_norm(x_NH))), x_NH)
