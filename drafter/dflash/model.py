"""The DFlash drafter (arXiv 2602.06036): context K/V from target features, a block in one pass.

Inference only, with a paged cache and fused weights (`weights.py`); `jobs/training` has its own module.
Called by `proposer.py`.

    taps [N, m, H] --fc, norm--> C [N, H] --one GEMM--> K, V of all layers --k_norm, rope--> pages
    [a, MASK x k] --target's embedding--> x --layers over context and block--> norm --head--> logits

DSpark's block is [a, MASK x (k - 1)], and all of its rows have logits.

The block's own K/V are written to the look-ahead slots n..n+k of the same pages. Later context overwrites
them; slots beyond a sequence's length are never read before the next block writes them.

Legend: N rows, X rows that sample a draft, m taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...cluster.pages.kv_cache_groups import LayerPlace
from ..compute.backend import Backend, PlacedRows
from ..compute.checkpoint.quantized_matrix import Matrix
from ..compute.eager.backend import EagerBackend
from ..compute.layers.linear import RMSNorm, scaled_logits
from ..compute.layers.rope import RotaryEmbedding
from ..compute.memory.kv_cache import PagedKVCache
from ..drafter_weights import DrafterWeights
from ..step.inputs.row_layout import StepRows
from .config import DrafterConfig
from .dspark_heads import CONFIDENCE, MARKOV, ConfidenceHead, make_markov
from .target_features import TargetEmbeddings
from .weights import (
    ContextProjection,
    QKVWeights,
    Selector,
    arranged,
    convolved,
    make_block,
    make_selector,
    norm_weight,
    with_values,
)


class ChosenRows(Protocol):
    """Rows of blocks on a device (`step/gpu_triton/inputs/row_layout.py`)."""

    def tokens_before(self, chosen_N: Tensor, anchor_distance: int, /) -> Tensor: ...


class DFlashDrafter:
    """A loaded drafter. Stateless: per-request state is in the cache passed to its methods.

    Args:
        weights: checkpoint tensors by Manta's names.
        places: where each layer's K and V are stored; by default all in one page group.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        shared_embeddings: TargetEmbeddings,
        max_positions: int,
        backend: Backend | None = None,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.config, self.anchor_distance = config, config.anchor_distance
        self.places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(config.num_layers))
        backend = backend or EagerBackend()
        self._shared_embeddings = shared_embeddings
        features_norm_H = weights["hidden_norm.weight"]
        self.dtype, self.device = features_norm_H.dtype, features_norm_H.device
        self._kv_scales = weights.kv_scales
        weights = arranged(config.rope, with_values(config, weights), config.attention_value_scale)
        groups: dict[int, list[int]] = {}
        for layer, place in enumerate(self.places):
            groups.setdefault(place.group, []).append(layer)
        qkv = QKVWeights(config, weights, groups.values())
        fc = weights.matrix("fc.weight")
        self._features = ContextFeatures(fc, features_norm_H, config.rms_norm_eps, backend)
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)
        blocks = [
            make_block(config, kind, weights, f"layers.{i}.", qkv.of_layer(i, backend), self._rope, backend)
            for i, kind in enumerate(config.layers)
        ]
        final_norm = RMSNorm(norm_weight(config, weights["norm.weight"]), config.rms_norm_eps)
        if config.convolutions is None:
            self._stack = backend.stack(blocks, final_norm)
        else:
            with_convolutions = [
                convolved(weights, f"layers.{i}.", block, backend) for i, block in enumerate(blocks)
            ]
            self._stack = backend.convolved_stack(with_convolutions, final_norm)
        self._context = [
            ContextProjection(config, weights, qkv.keys_and_values(layers, backend), layers, backend)
            for layers in groups.values()
        ]
        self._embedding_VH = weights.get("embed_tokens.weight")
        self._own_head = backend.head(weights["lm_head.weight"]) if "lm_head.weight" in weights else None
        self._target_ids_V: Tensor | None = None
        if config.maps_vocabulary:
            d2t = weights["d2t"].long()
            self._target_ids_V = torch.arange(len(d2t), device=d2t.device) + d2t
        self.selector: Selector | None = None
        if config.selector is not None:
            self.selector = make_selector(weights, config.selector, backend)
        elif config.markov is not None:
            self.selector = make_markov(weights, config.markov, config.vocab_size, self._target_ids_V)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence_head is not None:
            reads_token = config.confidence_head == "hidden and token before"
            previous_VE = weights[f"{MARKOV}.markov_w1.weight"] if reads_token else None
            weight_1F, bias_1 = weights[f"{CONFIDENCE}.weight"], weights[f"{CONFIDENCE}.bias"]
            self.confidence_head = ConfidenceHead(weight_1F, bias_1, previous_VE)
        scale = config.input_embedding_scale
        self._embed_scale = 1.0 if scale is None else scale
        self._mask_H: Tensor | None = None  # set if the mask embedding is not a row of the embedding
        if "mask_embedding" in weights:
            self._mask_H = weights["mask_embedding"] * self._embed_scale

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        """Return pages for K/V of `dtype`, by default the drafter's; in e4m3 with the checkpoint's scales."""
        sizes, dtype = (self.places, num_pages, page_size, self.config.kv_geometry), dtype or self.dtype
        scales = self._kv_scales() if dtype is torch.float8_e4m3fn else ()
        return PagedKVCache(*sizes, dtype, self.device, scales=scales)

    def context_features(self, taps_NmH: Tensor) -> Tensor:
        """Return C [N, H], from which context K/V are projected."""
        assert taps_NmH.shape[1] == len(self.config.target_layer_ids), "taps must match target_layer_ids"
        return self._features(taps_NmH)

    def write_context(self, c_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Write context K/V of all layers at these rows; rows with the cache's `skip_slot` are dropped."""
        for layers in self._context:
            layers.write(layers.kv(c_NH), self._rope, rows, cache, layers.first)

    def embed_block(self, token_ids_N: Tensor) -> Tensor:
        """Return the block's input embeddings [N, H]; all rows but the anchors hold the mask token."""
        if self._mask_H is None:
            return self._embed(token_ids_N)
        is_mask_N = token_ids_N == self.config.mask_token_id  # the id may be outside the embedding
        x_NH = self._embed(token_ids_N.masked_fill(is_mask_N, 0))
        return torch.where(is_mask_N.unsqueeze(1), self._mask_H, x_NH)

    def forward(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> Tensor:
        """Return normed hidden states [N, H] of a block's rows; writes their K/V after the context."""
        return self._stack(x_NH, rows, cache)[0]

    def block_hidden(self, block: StepRows, cache: PagedKVCache) -> Tensor:
        """Return normed hidden states [X, H] of every row that samples a draft, in request order."""
        hidden_NH, _ = self._stack(self.embed_block(block.token_ids_N), block, cache)
        if block.anchor_distance == 0:  # all rows do
            return hidden_NH
        return hidden_NH.index_select(0, block.sampled_X)

    def block_logits(self, block: StepRows, cache: PagedKVCache) -> Tensor:
        """Return logits [X, V] over the target's vocabulary for every row that samples a draft."""
        return self.logits(self.block_hidden(block, cache))

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        if self._embedding_VH is not None:
            rows_NH = self._embedding_VH.index_select(0, token_ids_N)
        else:
            rows_NH = self._shared_embeddings.embed(token_ids_N).to(self.dtype)
        return rows_NH if self._embed_scale == 1.0 else rows_NH * self._embed_scale

    def sharpen(self, margins_N: Tensor, hidden_NH: Tensor, chosen_N: Tensor, rows: ChosenRows) -> Tensor:
        """Return the margins [N] of a block's choices, sharpened if there is a confidence head."""
        if self.confidence_head is None:
            return margins_N
        before_N = rows.tokens_before(chosen_N, self.anchor_distance)
        return self.confidence_head.sharpen(margins_N, hidden_NH, before_N)

    @property
    def is_split(self) -> bool:
        return self._own_head is None and self._shared_embeddings.is_split

    def logits(self, y_XH: Tensor) -> Tensor:
        """Return logits [X, V] over the target's vocabulary; -inf for tokens without a draft id."""
        z_XV = self._scaled(
            self._shared_embeddings.logits(y_XH) if self._own_head is None else self._own_head(y_XH)
        )
        if self._target_ids_V is None:
            return z_XV
        full_XV = z_XV.new_full((len(z_XV), self.config.vocab_size), float("-inf"))
        return full_XV.index_copy_(1, self._target_ids_V, z_XV)

    def local_logits(self, y_XH: Tensor) -> tuple[Tensor, int]:
        """Return this rank's slice of the borrowed head's logits, and the slice's first token id."""
        assert self._own_head is None, "a head of its own is whole on every rank"
        z_XU, first_id = self._shared_embeddings.local_logits(y_XH)
        return self._scaled(z_XU), first_id

    def _scaled(self, z_XV: Tensor) -> Tensor:
        multiplier, cap = self.config.output_multiplier, self.config.logit_softcap
        return z_XV if multiplier == 1.0 and cap is None else scaled_logits(z_XV, multiplier, cap)


class ContextFeatures:
    """fc and norm: taps [N, m, H] -> C [N, H]. A remote drafter's part in the target's process."""

    __slots__ = ("_backend", "_dtype", "_fc", "_norm")

    def __init__(self, fc_weight: Matrix, norm_weight: Tensor, eps: float, backend: Backend) -> None:
        self._backend = backend
        self._fc = backend.linear_of_either(fc_weight)
        self._norm = RMSNorm(norm_weight, eps)
        self._dtype = norm_weight.dtype

    def __call__(self, taps_NmH: Tensor) -> Tensor:
        return self._backend.norm(self._norm, self._fc(taps_NmH.flatten(1).to(self._dtype)))
