"""The EAGLE-3 drafter (arXiv 2503.01840): a fused target feature and the next token give the logits after it.

Inference only, with a paged cache. Called by `proposer.py`.

    taps [N, m, H'] --(norm), fc--> g [N, H]                  a feature of each of the target's rows
    entry i, from token i and g of position i - 1:
    [norm E[token i] ; norm g] [N, 2H] --q, k, v--> attention --o--> + g --norm, MLP--> + --> x [N, H]
    x --norm, head--> z [N, V]                              logits of token i + 1

Past the target's newest row x replaces g: entry i + 1 of a chain is made from the drafted token and x. Entry
i's K and V are at position i of its pages, so a page depends only on its own and earlier tokens; position 0
has no entry, and is masked for all rows (docs/decisions/eagle3.md).

Legend: N rows, X rows of the head, m taps, H hidden, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...cluster.pages.kv_cache_groups import LayerPlace
from ..compute.backend import Backend, PlacedRows
from ..compute.block_weights import Projection
from ..compute.blocks import TransformerBlock
from ..compute.eager.backend import EagerBackend
from ..compute.layers.linear import HeadNorm, RMSNorm
from ..compute.layers.rope import RotaryEmbedding
from ..compute.memory.kv_cache import PagedKVCache
from ..dflash.target_features import TargetEmbeddings
from ..dflash.weights import QKVWeights, arranged, make_block
from ..drafter_weights import DrafterWeights
from .config import Eagle3Config

LAYER = "layers.0."  # prefix of tensor names


class Eagle3Drafter:
    """A loaded drafter. Stateless: per-request state is in the pages passed to its methods.

    Args:
        weights: checkpoint tensors by Manta's names.
        places: where its layer's K and V are stored; by default in the first page group.
    """

    reads_target_kv = has_layer_per_draft = False

    def __init__(
        self,
        config: Eagle3Config,
        weights: DrafterWeights,
        shared_embeddings: TargetEmbeddings,
        max_positions: int,
        backend: Backend | None = None,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.config = config
        self.places = tuple(places) or (LayerPlace(0, 0),)
        operators = self._operators = backend or EagerBackend()
        self._shared_embeddings = shared_embeddings
        eps, norm_H = config.rms_norm_eps, weights["norm.weight"]
        self.dtype, self.device = norm_H.dtype, norm_H.device
        self._kv_scales = weights.kv_scales
        self._fc = operators.linear_of_either(weights.matrix("fc.weight"))
        taps_norm = weights.get("input_norm.weight")
        self._taps_norm = None if taps_norm is None else RMSNorm(taps_norm, eps)
        self._token_norm, self._hidden_norm, self._final_norm = (
            RMSNorm(weights[name], eps)
            for name in (f"{LAYER}input_layernorm.weight", f"{LAYER}hidden_norm.weight", "norm.weight")
        )
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)
        self._block, self._kv, self._k_norm = self._make_layer(weights, operators)
        self._embedding_VH = weights.get("embed_tokens.weight")
        self._own_head = operators.head(weights["lm_head.weight"]) if "lm_head.weight" in weights else None
        self._target_ids_V: Tensor | None = None
        if config.maps_vocabulary:
            d2t = weights["d2t"].long()
            self._target_ids_V = torch.arange(len(d2t), device=d2t.device) + d2t

    def _make_layer(
        self, weights: DrafterWeights, backend: Backend
    ) -> tuple[TransformerBlock, Projection, HeadNorm | None]:
        """Return the layer, and for `write_entries` its K and V projection and the norm of keys, if any."""
        config, eps = self.config, self.config.rms_norm_eps
        weights = arranged(config.rope, weights)
        qkv = QKVWeights(config, weights, groups=[[0]])  # one page group with the only layer
        shape, parts = make_block(
            config, config.layers[0], weights, LAYER, qkv.of_layer(0, backend), self._rope, backend
        )
        # `g` has a norm of its own; `input_layernorm` is that of the token's embedding.
        parts = replace(parts, attention_norm=self._hidden_norm)
        k_norm_D = shape.k_norm_D
        k_norm = None if k_norm_D is None else HeadNorm(k_norm_D.expand(config.num_kv_heads, -1), eps)
        # No row sees position 0, which has no entry.
        block = TransformerBlock(backend, replace(shape, first_key=1), parts)
        return block, qkv.keys_and_values([0], backend), k_norm

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        """Return pages for K/V of `dtype`, by default the drafter's; in e4m3 with the checkpoint's scales."""
        sizes, dtype = (self.places, num_pages, page_size, self.config.kv_geometry), dtype or self.dtype
        scales = self._kv_scales() if dtype is torch.float8_e4m3fn else ()
        return PagedKVCache(*sizes, dtype, self.device, scales=scales)

    def features(self, taps_NmH: Tensor) -> Tensor:
        """Return the fused features g [N, H] of the target's rows."""
        assert taps_NmH.shape[1] == self.config.num_taps, "taps must match target_layer_ids"
        taps_NT = taps_NmH.flatten(1).to(self.dtype)
        if self._taps_norm is not None:
            taps_NT = self._operators.norm(self._taps_norm, taps_NT)
        return self._fc(taps_NT)

    def write_entries(self, token_ids_N: Tensor, g_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Write K and V of entries, from features of the positions before; rows at position 0 are dropped."""
        kv_NO = self._kv(self._inputs(token_ids_N, g_NH)[0])
        num_kv, head_dim = self.config.num_kv_heads, self.config.head_dim
        k_NKD = kv_NO[:, : num_kv * head_dim].unflatten(-1, (num_kv, head_dim))
        normed_NKD = k_NKD if self._k_norm is None else self._k_norm(k_NKD)
        self._rope.at(rows.positions_N).rotate(normed_NKD, out_NJD=k_NKD)
        slots_N = rows.kv_slots[cache.group(0)].masked_fill(rows.positions_N == 0, cache.skip_slot)
        cache.write(0, slots_N, kv_NO)

    def forward(
        self, token_ids_N: Tensor, g_NH: Tensor, rows: PlacedRows, cache: PagedKVCache, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run entries and write their K and V; return x [N, H], which makes the next entry, and its norm.

        `g_NH` are features of the position before each row's, or the x that a pass returned for it.
        """
        both_N2H, residual_NH = self._inputs(token_ids_N, g_NH)
        step = self._operators.begin(rows)
        x_NH, normed_NH = self._block(residual_NH, both_N2H, step, cache, 0, self._final_norm)
        return x_NH, self._operators.as_tensor(normed_NH)

    def _inputs(self, token_ids_N: Tensor, g_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of q, k and v [N, 2 H] and the start of the residual [N, H]."""
        token_NH = self._operators.norm(self._token_norm, self._embed(token_ids_N))
        normed_NH = self._operators.norm(self._hidden_norm, g_NH)
        residual_NH = normed_NH if self.config.norm_before_residual else g_NH
        return torch.cat((token_NH, normed_NH), dim=-1), residual_NH

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        if self._embedding_VH is not None:
            return self._embedding_VH.index_select(0, token_ids_N)
        return self._shared_embeddings.embed(token_ids_N).to(self.dtype)

    def logits(self, normed_XH: Tensor) -> Tensor:
        """Return logits [X, V] over the target's vocabulary; -inf for tokens without a draft id."""
        z_XV = (
            self._shared_embeddings.logits(normed_XH) if self._own_head is None else self._own_head(normed_XH)
        )
        if self._target_ids_V is None:
            return z_XV
        full_XV = z_XV.new_full((len(z_XV), self.config.vocab_size), float("-inf"))
        return full_XV.index_copy_(1, self._target_ids_V, z_XV)
