"""The DFlash drafter: target features become context K/V; a block [anchor, MASK..] becomes logits at once.

Inference only, written over a paged cache and fused weights; `training/` has a module of its own. Called by
`propose.py`.

    taps [N, m, H] --fc, norm--> C [N, H] --one GEMM--> K, V of all layers --k_norm, rope--> pages [a, MASK
    x k]  --target's embedding--> x --layers over pages (context and own block)--> norm --head--> logits

The block's own K/V go into the look-ahead slots n..n+k of the same pages; true context overwrites them later,
and what it does not overwrite lies behind every length until a next block does.

Legend: N rows, X mask rows, B requests, m taps, H hidden, O outputs, L layers, R keys or values of one, D
head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...cluster.page_groups import LayerPlace
from ..compute.backend import AttentionShape, Backend, BlockWeights, DenseMLP, PlacedRows
from ..compute.eager.backend import TorchBackend
from ..compute.kv_cache import PagedKVCache
from ..compute.layers import RMSNorm
from ..compute.rope import RotaryEmbedding
from ..step.rows import StepRows
from .config import DrafterConfig, DraftLayer
from .features import TargetLends


class DFlashDrafter:
    """A loaded drafter. Holds no state of requests: that is in the cache it is given.

    Args:
        weights: checkpoint tensors by name, on the device and in the dtype to compute in.
        lends: the target's embedding and head.
        max_positions: positions that may occur.
        places: of each layer's K and V; all in one page group by default.
        backend: computes what is no matrix product; PyTorch's own by default.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        lends: TargetLends,
        max_positions: int,
        backend: Backend | None = None,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.config = config
        self.places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(config.num_layers))
        backend = backend or TorchBackend()
        self._lends = lends
        fc = weights["fc.weight"]
        self.dtype, self.device = fc.dtype, fc.device
        weights = _arranged(config, weights)
        groups: dict[int, list[int]] = {}
        for layer, place in enumerate(self.places):
            groups.setdefault(place.group, []).append(layer)
        qkv = _QKVWeights(config, weights, groups.values())
        self._features = ContextFeatures(fc, weights["hidden_norm.weight"], config.rms_norm_eps, backend)
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)
        blocks = [
            _block(config, kind, weights, f"layers.{i}.", qkv.of_layer(i), self._rope, backend)
            for i, kind in enumerate(config.layers)
        ]
        final_norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps)
        self._stack = backend.stack(blocks, final_norm)
        self._context = [
            _ContextProjection(config, weights, qkv.keys_and_values(layers), layers, backend)
            for layers in groups.values()
        ]
        self._embedding_VH = weights.get("embed_tokens.weight")
        self._own_head = backend.head(weights["lm_head.weight"]) if "lm_head.weight" in weights else None
        self._target_ids_V: Tensor | None = None
        if config.maps_vocabulary:
            d2t = weights["d2t"].long()
            self._target_ids_V = torch.arange(len(d2t), device=d2t.device) + d2t
        self._mask_H: Tensor | None = None  # where it is no row of the embedding
        if "mask_embedding" in weights:
            self._mask_H = weights["mask_embedding"] * config.input_embedding_scale

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Pages for this drafter's context."""
        c = self.config
        return PagedKVCache(
            self.places, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device
        )

    def context_features(self, taps_NmH: Tensor) -> Tensor:
        """C [N, H]: what context K/V are made of."""
        assert taps_NmH.shape[1] == self.config.num_taps, "taps must match target_layer_ids"
        return self._features(taps_NmH)

    def write_context(self, c_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Context K/V of all layers at these rows; a row with the cache's `skip_slot` is dropped."""
        for project in self._context:
            project(c_NH, self._rope, rows, cache)

    def embed_block(self, token_ids_N: Tensor) -> Tensor:
        """The block's input embeddings [N, H], from token ids: the mask's in all rows but the anchors'."""
        if self._mask_H is None:
            return self._embed(token_ids_N)
        is_mask_N = token_ids_N == self.config.mask_token_id  # no row of the embedding, perhaps
        x_NH = self._embed(token_ids_N.masked_fill(is_mask_N, 0))
        return torch.where(is_mask_N.unsqueeze(1), self._mask_H, x_NH)

    def forward(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> Tensor:
        """Normed hidden states [N, H] of a block's rows, writing their K/V behind the context."""
        return self._stack(x_NH, rows, cache)[0]

    def block_logits(self, block: StepRows, cache: PagedKVCache) -> Tensor:
        """Logits [X, V] of the target's vocabulary for every mask row, request after request."""
        hidden_NH = self.forward(self.embed_block(block.token_ids_N), block, cache)
        return self.logits(hidden_NH.index_select(0, block.sampled_X))

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        if self._embedding_VH is not None:
            rows_NH = self._embedding_VH.index_select(0, token_ids_N)
        else:
            rows_NH = self._lends.embed(token_ids_N).to(self.dtype)
        scale = self.config.input_embedding_scale
        return rows_NH if scale == 1.0 else rows_NH * scale

    @property
    def is_split(self) -> bool:
        """Whether ranks have parts of the head: of a borrowed one."""
        return self._own_head is None and self._lends.is_split

    def logits(self, y_XH: Tensor) -> Tensor:
        """The head [X, V] on the target's vocabulary, from normed hidden states."""
        z_XV = self._scaled(self._lends.logits(y_XH) if self._own_head is None else self._own_head(y_XH))
        if self._target_ids_V is None:
            return z_XV
        full_XV = z_XV.new_full((len(z_XV), self.config.vocab_size), float("-inf"))
        return full_XV.index_copy_(1, self._target_ids_V, z_XV)

    def local_logits(self, y_XH: Tensor) -> tuple[Tensor, int]:
        """The borrowed head over this rank's part of the vocabulary, and the first token id of that part."""
        assert self._own_head is None, "a head of its own is whole on every rank"
        z_XU, first_id = self._lends.local_logits(y_XH)
        return self._scaled(z_XU), first_id

    def _scaled(self, z_XV: Tensor) -> Tensor:
        """As the configuration wants the head's output."""
        config = self.config
        if config.output_multiplier != 1.0:
            z_XV = z_XV * config.output_multiplier
        if config.logit_softcap is not None:
            z_XV = config.logit_softcap * torch.tanh(z_XV / config.logit_softcap)
        return z_XV


class ContextFeatures:
    """fc and norm: taps [N, m, H] -> C [N, H]. All that a split drafter leaves with the target."""

    __slots__ = ("_backend", "_dtype", "_fc", "_norm")

    def __init__(self, fc_weight: Tensor, norm_weight: Tensor, eps: float, backend: Backend) -> None:
        self._backend = backend
        self._fc = backend.linear(fc_weight)
        self._norm = RMSNorm(norm_weight, eps)
        self._dtype = fc_weight.dtype

    def __call__(self, taps_NmH: Tensor) -> Tensor:
        return self._backend.norm(self._norm, self._fc(taps_NmH.flatten(1).to(self._dtype)))


def _arranged(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Query and key rows in the order that the rotation's tables want."""
    if config.rope.permutation() is None:
        return weights
    kinds = tuple(f"self_attn.{kind}.weight" for kind in ("q_proj", "k_proj", "q_norm", "k_norm"))
    return {
        name: config.rope.arranged(tensor) if name.endswith(kinds) else tensor
        for name, tensor in weights.items()
    }


class _QKVWeights:
    """The weights of all layers' queries, keys and values in one tensor: products that share rows share them.

    Args:
        groups: the layers, in the order in which they lie there.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], groups: Iterable[Sequence[int]]
    ) -> None:
        self._order = [layer for layers in groups for layer in layers]
        rows = [weights[f"layers.{i}.self_attn.{kind}_proj.weight"] for i in self._order for kind in "qkv"]
        self._qkv_LOH = torch.cat(rows).unflatten(0, (len(self._order), -1))
        self._num_q = config.num_heads * config.head_dim

    def of_layer(self, layer: int) -> Tensor:
        """[O, H]: its queries', keys' and values'."""
        return self._qkv_LOH[self._order.index(layer)]

    def keys_and_values(self, layers: Sequence[int]) -> Tensor:
        """[2, L, R, H]: keys of all of a group's layers, then values, where they lie."""
        first = self._order.index(layers[0])
        kv_LRH = self._qkv_LOH[first : first + len(layers), self._num_q :]
        return kv_LRH.unflatten(1, (2, -1)).transpose(0, 1)


def _block(
    config: DrafterConfig,
    kind: DraftLayer,
    weights: Mapping[str, Tensor],
    at: str,
    qkv_OH: Tensor,
    rope: RotaryEmbedding,
    backend: Backend,
) -> tuple[AttentionShape, BlockWeights]:
    eps = config.rms_norm_eps
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        q_norm_D=weights[f"{at}self_attn.q_norm.weight"],
        k_norm_D=weights[f"{at}self_attn.k_norm.weight"],
        eps=eps,
        rope=rope,
        scale=config.head_dim**-0.5,
        causal=kind.causal,
        window=kind.window,
    )
    gate_up_IH = torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    parts = BlockWeights(
        attention_norm=RMSNorm(weights[f"{at}input_layernorm.weight"], eps),
        qkv=backend.linear(qkv_OH),
        o=backend.linear(weights[f"{at}self_attn.o_proj.weight"]),
        mlp_norm=RMSNorm(weights[f"{at}post_attention_layernorm.weight"], eps),
        mlp=DenseMLP(
            gate_up=backend.linear(gate_up_IH), down=backend.linear(weights[f"{at}mlp.down_proj.weight"])
        ),
    )
    return shape, parts


class _ContextProjection:
    """K and V of a page group's layers from C: one product, then norm, rotation and write."""

    __slots__ = ("_first", "_kv", "_write")

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        kv_2LRH: Tensor,
        layers: Sequence[int],
        backend: Backend,
    ) -> None:
        self._kv = backend.linear_of_blocks(kv_2LRH)  # all keys first: norm and rotation see one slice
        norms_LD = torch.stack([weights[f"layers.{i}.self_attn.k_norm.weight"] for i in layers])
        self._write = backend.context_writer(norms_LD, config.rms_norm_eps, config.num_kv_heads)
        self._first = layers[0]

    def __call__(self, c_NH: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache) -> None:
        self._write(self._kv(c_NH), rope, rows, cache, self._first)
