"""The DFlash drafter: target features become context K/V; a block [anchor, MASK..] becomes logits at once.

Inference only, written over a paged cache and fused weights; `training/` has a module of its own. Called by
`propose.py`.

    taps [N, m, H] --fc, norm--> C [N, H] --one GEMM--> K, V of all layers --k_norm, rope--> pages [a, MASK
    x k]  --target's embedding--> x --layers over pages (context and own block)--> norm --head--> logits

The block's own K/V go into the look-ahead slots n..n+k of the same pages; true context overwrites them later,
and what it does not overwrite lies behind every length until a next block does.

Legend: N rows, X mask rows, B requests, m taps, H hidden, L layers, Q query heads, K kv heads, J = Q + 2K,
D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .attention import paged_attention
from .config import DrafterConfig, DraftLayer
from .features import TargetLends
from .kv_cache import PagedKVCache
from .layers import HeadNorm, Linear, RMSNorm, RotaryEmbedding, Rotation, silu_mul
from .states import BlockRows


class DFlashDrafter:
    """A loaded drafter. Holds no state of requests: that is in the cache it is given.

    Args:
        weights: checkpoint tensors by name, on the device and in the dtype to compute in.
        lends: the target's embedding and head.
        max_positions: positions that may occur.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], lends: TargetLends, max_positions: int
    ) -> None:
        self.config = config
        self._lends = lends
        fc = weights["fc.weight"]
        self.dtype, self.device = fc.dtype, fc.device
        self._features = ContextFeatures(fc, weights["hidden_norm.weight"], config.rms_norm_eps)
        self._final_norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps)
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)
        self._layers = [_Layer(config, kind, weights, f"layers.{i}.") for i, kind in enumerate(config.layers)]
        self._context = _ContextProjection(config, weights)
        self._embedding_VH = weights.get("embed_tokens.weight")
        self._own_head = Linear(weights["lm_head.weight"]) if "lm_head.weight" in weights else None
        self._target_ids_V: Tensor | None = None
        if config.maps_vocabulary:
            d2t = weights["d2t"].long()
            self._target_ids_V = torch.arange(len(d2t), device=d2t.device) + d2t
        self._mask_H = self._mask_row(weights.get("mask_embedding"))

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Pages for this drafter's context, with the target's page ids."""
        c = self.config
        return PagedKVCache(
            c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device
        )

    def context_features(self, taps_NmH: Tensor) -> Tensor:
        """C [N, H]: what context K/V are made of."""
        assert taps_NmH.shape[1] == self.config.num_taps, "taps must match target_layer_ids"
        return self._features(taps_NmH)

    def write_context(self, c_NH: Tensor, positions_N: Tensor, slots_N: Tensor, cache: PagedKVCache) -> None:
        """Context K/V of all layers at these rows; a row with the cache's `skip_slot` is dropped."""
        cache.write_all(slots_N, self._context(c_NH, self._rope.at(positions_N)))

    def block_logits(self, block: BlockRows, cache: PagedKVCache) -> Tensor:
        """Logits [X, V] of the target's vocabulary for every mask row, request after request."""
        rotation = self._rope.at(block.positions_N)
        x_NH = self._inputs(block)
        for i, layer in enumerate(self._layers):
            x_NH = layer(x_NH, rotation, block, cache, i)
        return self._logits(self._final_norm(x_NH.index_select(0, block.mask_rows_X)))

    def _inputs(self, block: BlockRows) -> Tensor:
        x_NH = self._mask_H.repeat(len(block.positions_N), 1)
        return x_NH.index_copy_(0, block.anchor_rows_B, self._embed(block.anchors_B))

    def _mask_row(self, replacement_H: Tensor | None) -> Tensor:
        if replacement_H is not None:
            return replacement_H * self.config.input_embedding_scale
        return self._embed(torch.tensor([self.config.mask_token_id], device=self.device))[0]

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        if self._embedding_VH is not None:
            rows_NH = self._embedding_VH.index_select(0, token_ids_N)
        else:
            rows_NH = self._lends.embed(token_ids_N).to(self.dtype)
        scale = self.config.input_embedding_scale
        return rows_NH if scale == 1.0 else rows_NH * scale

    def _logits(self, y_XH: Tensor) -> Tensor:
        config = self.config
        z_XV = self._lends.logits(y_XH) if self._own_head is None else self._own_head(y_XH)
        if config.output_multiplier != 1.0:
            z_XV = z_XV * config.output_multiplier
        if config.logit_softcap is not None:
            z_XV = config.logit_softcap * torch.tanh(z_XV / config.logit_softcap)
        if self._target_ids_V is None:
            return z_XV
        full_XV = z_XV.new_full((len(z_XV), config.vocab_size), float("-inf"))
        return full_XV.index_copy_(1, self._target_ids_V, z_XV)


class ContextFeatures:
    """fc and norm: taps [N, m, H] -> C [N, H]. All that a split drafter leaves with the target."""

    __slots__ = ("_dtype", "_fc", "_norm")

    def __init__(self, fc_weight: Tensor, norm_weight: Tensor, eps: float) -> None:
        self._fc = Linear(fc_weight)
        self._norm = RMSNorm(norm_weight, eps)
        self._dtype = fc_weight.dtype

    def __call__(self, taps_NmH: Tensor) -> Tensor:
        return self._norm(self._fc(taps_NmH.flatten(1).to(self._dtype)))


class _Layer:
    """One pre-norm block over the rows of a block; keys and values are read from pages."""

    __slots__ = (
        "_down",
        "_gate_up",
        "_head_norm",
        "_input_norm",
        "_kind",
        "_num_kv",
        "_num_q",
        "_o",
        "_post_norm",
        "_qkv",
        "_scale",
        "_shape",
    )

    def __init__(
        self, config: DrafterConfig, kind: DraftLayer, weights: Mapping[str, Tensor], at: str
    ) -> None:
        eps = config.rms_norm_eps
        attention = [weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
        self._qkv = Linear(torch.cat(attention))
        self._o = Linear(weights[f"{at}self_attn.o_proj.weight"])
        self._gate_up = Linear(
            torch.cat((weights[f"{at}mlp.gate_proj.weight"], weights[f"{at}mlp.up_proj.weight"]))
        )
        self._down = Linear(weights[f"{at}mlp.down_proj.weight"])
        self._input_norm = RMSNorm(weights[f"{at}input_layernorm.weight"], eps)
        self._post_norm = RMSNorm(weights[f"{at}post_attention_layernorm.weight"], eps)
        q_norm, k_norm = weights[f"{at}self_attn.q_norm.weight"], weights[f"{at}self_attn.k_norm.weight"]
        self._num_q, self._num_kv = config.num_heads, config.num_kv_heads
        self._head_norm = HeadNorm(
            torch.cat((q_norm.expand(self._num_q, -1), k_norm.expand(self._num_kv, -1))), eps
        )
        self._shape = (self._num_q + 2 * self._num_kv, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._kind = kind

    def __call__(
        self, x_NH: Tensor, rotation: Rotation, block: BlockRows, cache: PagedKVCache, layer: int
    ) -> Tensor:
        num_q, num_kv = self._num_q, self._num_kv
        qkv_NJD = self._qkv(self._input_norm(x_NH)).unflatten(-1, self._shape)
        qk = qkv_NJD[:, : num_q + num_kv]
        rotation.rotate(self._head_norm(qk), out_NJD=qk)
        cache.write(layer, block.kv_slots_N, qkv_NJD[:, num_q:].unflatten(1, (2, num_kv)))
        attended = paged_attention(
            qkv_NJD[:, :num_q],
            cache,
            layer,
            block.batch,
            self._scale,
            causal=self._kind.causal,
            window=self._kind.window,
        )
        x_NH = self._o(attended, x_NH)
        return self._down(silu_mul(self._gate_up(self._post_norm(x_NH))), x_NH)


class _ContextProjection:
    """K and V of all layers from C: one product, one norm, one rotation."""

    __slots__ = ("_head_dim", "_k_norm", "_kv", "_num_kv", "_num_layers")

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
        self._num_layers, self._num_kv, self._head_dim = (
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
        )
        layers = range(config.num_layers)
        rows = [weights[f"layers.{i}.self_attn.{kind}_proj.weight"] for kind in "kv" for i in layers]
        self._kv = Linear(torch.cat(rows))  # all keys first, so that norm and rotation see one slice
        norms_LD = torch.stack([weights[f"layers.{i}.self_attn.k_norm.weight"] for i in layers])
        self._k_norm = HeadNorm(norms_LD.repeat_interleave(self._num_kv, dim=0), config.rms_norm_eps)

    def __call__(self, c_NH: Tensor, rotation: Rotation) -> Tensor:
        """[L, N, 2, K, D]."""
        num_keys = self._num_layers * self._num_kv
        kv_NJD = self._kv(c_NH).unflatten(-1, (2 * num_keys, self._head_dim))
        keys = kv_NJD[:, :num_keys]
        rotation.rotate(self._k_norm(keys), out_NJD=keys)
        return kv_NJD.unflatten(1, (2, self._num_layers, self._num_kv)).permute(2, 0, 1, 3, 4)
