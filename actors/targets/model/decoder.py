"""The target: a decoder over paged K/V, with one implementation for every family (`model_spec.py`).

Stateless: requests' K/V are in the cache passed to it. A backend computes its blocks, with projections split
between ranks. The drafter borrows its embedding and head, without the target's scaling.

    token ids --embedding, scale or norm--> x --blocks, some with taps after--> norm --head, cap--> logits

Legend: N rows, X sampled rows, H hidden, m taps, V vocabulary; O outputs of a rank's product (q, k,
v), Q and K widths of its queries and of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....cluster.pages.kv_cache_groups import LayerPlace
from ....drafter.compute.backend import Backend, PlacedRows
from ....drafter.compute.block_weights import (
    AttentionShape,
    BlockWeights,
    DenseMLP,
    MixerShape,
    ParallelMLP,
    RoutedExperts,
)
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.layers.linear import RMSNorm, scaled_logits
from ....drafter.compute.layers.mla import MLALayer
from ....drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.compute.memory.recurrent_state_cache import StateMemory
from .attention import TargetAttention
from .delta_net import DeltaNet
from .mlp_spec import GatedMLP, ParallelMlpSpec, RoutedMLP
from .mlp_weights import DenseTensors, MlpTensors, ParallelMlpTensors, RoutedTensors
from .model_spec import LayerSpec
from .tensor_parallel import Communicator, Sharding, VocabHead, rank_sum, row_linear, vocab_embedding
from .weights import LatentTensors, LayerWeights, TargetWeights

RopeOf = Callable[[RopeConfig | None], RotaryEmbedding | None]


class Decoder:
    """One rank's part of a target.

    Args:
        weights: the rank's slices; read here, layer by layer.
        tap_ids: 0-based blocks with outputs that the drafter reads, in its order; may be empty.
        backend: computes everything but the collectives, also for a colocated drafter; PyTorch's by default.
        places: where the K and V of each layer with attention are; all in one page group by default.
    """

    def __init__(
        self,
        weights: TargetWeights,
        tap_ids: Sequence[int],
        max_positions: int,
        communicator: Communicator,
        backend: Backend | None = None,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        spec, sharding = weights.spec, weights.sharding
        self.spec = spec
        self.places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(len(spec.attentions)))
        self._sharding, self._kv_scales = sharding, weights.kv_scales()
        self.backend = backend = backend or EagerBackend()
        self.dtype, self.device = weights.dtype, weights.device
        embedding_UH, head_UH = weights.vocabulary(as_codes=backend.packs_vocabulary)
        head = backend.head(head_UH)
        # The scale is rounded to the weights' dtype, as in the model's reference code.
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self._embed_norm: RMSNorm | None = None
        if spec.embed_norm:
            self._embed_norm = RMSNorm(
                torch.ones(spec.hidden_size, dtype=self.dtype, device=self.device), spec.rms_norm_eps
            )
        self.shared_embeddings = SharedEmbeddings(
            vocab_embedding(
                backend.embedding(embedding_UH, head if spec.tied_head else None), sharding, communicator
            ),
            VocabHead(head, spec.vocab_size, sharding, communicator),
            is_split=sharding.world_size > 1,
        )
        self.rope_of = RopeTables(max_positions, self.dtype, self.device)
        blocks = [make_block(weights, i, self.rope_of, communicator, backend) for i in range(spec.num_layers)]
        final_norm = RMSNorm(weights.final_norm(), spec.rms_norm_eps)
        self._stack = backend.stack(blocks, final_norm, tap_ids)
        self.num_routed = sum(layer.routed is not None for layer in spec.layers)

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        states: StateMemory | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedKVCache:
        """Return pages for K/V of `dtype`, by default the model's."""
        geometries, dtype = self._sharding.kv_geometries(), dtype or self.dtype
        sizes, scales = (self.places, num_pages, page_size, geometries), self._kv_scales
        return PagedKVCache(*sizes, dtype, self.device, states, scales)

    @property
    def is_split(self) -> bool:
        """Whether ranks have parts of the head."""
        return self.shared_embeddings.is_split

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the target's logits [N, V] of hidden states that are already normed."""
        return self._scale(self.shared_embeddings.logits(hidden_NH))

    def local_logits(self, hidden_NH: Tensor) -> tuple[Tensor, int]:
        """Return the logits of this rank's part of the vocabulary, and the first token id of that part."""
        logits_NU, first_id = self.shared_embeddings.local_logits(hidden_NH)
        return self._scale(logits_NU), first_id

    def _scale(self, logits_NV: Tensor) -> Tensor:
        multiplier, cap = self.spec.logit_multiplier, self.spec.logit_cap
        return logits_NV if multiplier == 1.0 and cap is None else scaled_logits(logits_NV, multiplier, cap)

    def forward(
        self, token_ids_N: Tensor, rows: PlacedRows, cache: PagedKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step's rows and write their K/V; return normed hidden states [N, H] and taps [N, m, H]."""
        x_NH = self.shared_embeddings.embed(token_ids_N)
        if self._embed_scale != 1.0:
            x_NH = x_NH * self._embed_scale
        if self._embed_norm is not None:
            x_NH = self.backend.norm(self._embed_norm, x_NH)
        return self._stack(x_NH, rows, cache)


class RopeTables:
    """Makes the tables of rotations, which are large: layers with equal rotations share them."""

    def __init__(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._how = max_positions, dtype, device
        self._made: list[tuple[RopeConfig, RotaryEmbedding]] = []

    def __call__(self, config: RopeConfig | None) -> RotaryEmbedding | None:
        if config is None:
            return None
        for known, rope in self._made:
            if known == config:
                return rope
        self._made.append((config, RotaryEmbedding(config, *self._how)))
        return self._made[-1][1]


class SharedEmbeddings:
    """`target_features.TargetEmbeddings` of a target in this process: its unscaled embedding and head."""

    def __init__(self, embed: Callable[[Tensor], Tensor], head: VocabHead, *, is_split: bool) -> None:
        self.embed, self.is_split = embed, is_split
        self.local_logits = head.local
        self.logits: Callable[[Tensor], Tensor] = head if is_split else head.linear


def make_block(
    weights: TargetWeights,
    layer: int,
    rope_of: RopeOf,
    communicator: Communicator,
    backend: Backend,
) -> tuple[MixerShape, BlockWeights]:
    """Return a block of a target, this rank's part; `rope_of` returns the tables of a rotation."""
    eps, sharding, spec = weights.spec.rms_norm_eps, weights.sharding, weights.spec.layers[layer]
    parts, mixer = weights.layer(layer), spec.mixer
    out_eps = eps if weights.spec.out_norm_eps is None else weights.spec.out_norm_eps

    def out_norm(weight_H: Tensor | None) -> RMSNorm | None:
        return None if weight_H is None else RMSNorm(weight_H, out_eps)

    row_norm = gate = None
    if (
        isinstance(mixer, TargetAttention)
        and mixer.row_norm
        and parts.q_norm is not None
        and parts.k_norm is not None
    ):
        row_norm = RowNorm(parts.q_norm, parts.k_norm, eps, sharding, layer, communicator, backend)
    if parts.attention_gate_OH is not None:
        gate = backend.linear_of_either(parts.attention_gate_OH)
    return _mixer_shape(weights, layer, parts, rope_of, backend), BlockWeights(
        attention_norm=RMSNorm(parts.attention_norm_H, eps),
        qkv=backend.linear_of_either(parts.qkv_OH, parts.qkv_bias_O),
        qkv_norm=row_norm,
        attention_gate=gate,
        o=row_linear(parts.o_HO, parts.o_bias_H, communicator, backend),
        attention_out_norm=out_norm(parts.attention_out_norm_H),
        mlp_norm=RMSNorm(parts.mlp_norm_H, eps),
        mlp=make_mlp(spec, parts.mlp, communicator, backend, eps, weights.dtype),
        mlp_out_norm=out_norm(parts.mlp_out_norm_H),
        scalar=None if parts.scalar_1 is None else parts.scalar_1.item(),
    )


def _mixer_shape(
    weights: TargetWeights, layer: int, parts: LayerWeights, rope_of: RopeOf, backend: Backend
) -> MixerShape:
    eps, sharding, mixer = weights.spec.rms_norm_eps, weights.sharding, weights.spec.layers[layer].mixer
    if isinstance(mixer, DeltaNet):
        assert parts.delta is not None, "a delta-net layer has delta-net tensors"
        return parts.delta.shape(sharding.state_geometry(layer), eps)
    return AttentionShape(
        num_heads=sharding.num_heads(layer),
        num_kv_heads=sharding.num_kv_heads(layer),
        head_dim=mixer.head_dim,
        v_head_dim=mixer.value_dim,
        q_norm_D=parts.q_norm if mixer.qk_norm else None,
        k_norm_D=parts.k_norm if mixer.qk_norm else None,
        eps=eps,
        rope=rope_of(mixer.rope),
        scale=mixer.scale,
        window=mixer.window,
        v_norm=mixer.v_norm,
        sinks_Q=parts.sinks_Q,
        latent=_latents(mixer, parts.latent, backend),
    )


def _latents(mixer: TargetAttention, tensors: LatentTensors | None, backend: Backend) -> MLALayer | None:
    latent = mixer.latent
    if latent is None or tensors is None:
        return None
    q_norm = None if tensors.q_norm_K is None else RMSNorm(tensors.q_norm_K, latent.eps)
    return MLALayer(
        q_norm=q_norm,
        q_up=None if tensors.q_up_OK is None else backend.linear_of_either(tensors.q_up_OK),
        kv_norm=RMSNorm(tensors.kv_norm_C, latent.eps),
        kv_up_JUC=tensors.kv_up_UC.unflatten(0, (-1, latent.nope_dim + latent.v_dim)),
        v_dim=latent.v_dim,
    )


class RowNorm:
    """RMSNorm over all queries, and over all keys, of a layer with heads split over ranks.

        scale of a row = 1 / sqrt(sum of its squares over all ranks' heads / (all heads * D) + eps)

    Not the per-head norm (`AttentionShape.q_norm_D`). Costs one small all-reduce per layer. `q_norm_Q` and
    `k_norm_K` are this rank's part of the weights.
    """

    __slots__ = ("_communicator", "_eps", "_row_squares", "_shares_2", "_weight_O", "_widths")

    def __init__(
        self,
        q_norm_Q: Tensor,
        k_norm_K: Tensor,
        eps: float,
        sharding: Sharding,
        layer: int,
        communicator: Communicator,
        backend: Backend,
    ) -> None:
        self._row_squares = backend.row_squares
        self._weight_O = torch.cat((q_norm_Q, k_norm_K)).float()
        self._widths = (len(q_norm_Q), len(k_norm_K))
        self._eps, self._communicator = eps, communicator
        mixer, ranks = sharding.spec.attention(layer), sharding.world_size
        # K/V heads that several ranks share are summed several times.
        copies = (1, ranks * sharding.num_kv_heads(layer) // mixer.num_kv_heads)
        sizes = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim)
        shares = [1.0 / (size * copy) for size, copy in zip(sizes, copies, strict=True)]
        self._shares_2 = torch.tensor(shares, device=q_norm_Q.device)

    def __call__(self, qkv_NO: Tensor) -> Tensor:
        """Norm queries and keys in place; values are unchanged."""
        squares_N2 = self._communicator.all_reduce(self._row_squares(qkv_NO, self._widths))
        scales_N2 = squares_N2.mul_(self._shares_2).add_(self._eps).rsqrt_()
        parts = qkv_NO.split((*self._widths, qkv_NO.shape[1] - sum(self._widths)), dim=1)
        weights = self._weight_O.split(self._widths)
        for part, scale_N1, weight in zip(parts[:2], scales_N2.split(1, dim=1), weights, strict=True):
            part.copy_(part.float().mul_(scale_N1).mul_(weight))
        return qkv_NO


def make_mlp(
    layer: LayerSpec,
    tensors: MlpTensors,
    communicator: Communicator,
    backend: Backend,
    eps: float,
    dtype: torch.dtype,
) -> DenseMLP | RoutedExperts | ParallelMLP:
    """Build a layer's MLP for computing in `dtype`; `eps` is of the norms of `ParallelMlpSpec`."""
    match layer.mlp, tensors:
        case GatedMLP(), DenseTensors():
            return _dense(layer.mlp, tensors, communicator, backend)
        case RoutedMLP(), RoutedTensors():
            return _routed(layer.mlp, tensors, communicator, backend, dtype)
        case ParallelMlpSpec(), ParallelMlpTensors():
            return ParallelMLP(
                dense=_dense(layer.mlp.dense, tensors.dense, communicator, backend),
                dense_out_norm=RMSNorm(tensors.dense_out_norm_H, eps),
                routed_norm=RMSNorm(tensors.routed_norm_H, eps),
                routed=_routed(layer.mlp.routed, tensors.routed, communicator, backend, dtype),
                routed_out_norm=RMSNorm(tensors.routed_out_norm_H, eps),
            )
        case _:
            raise AssertionError("tensors do not match the layer's specification")


def _dense(mlp: GatedMLP, tensors: DenseTensors, communicator: Communicator, backend: Backend) -> DenseMLP:
    return DenseMLP(
        gate_up=backend.linear_of_either(tensors.gate_up_IH, tensors.gate_up_bias_I),
        activation=mlp.activation,
        down=row_linear(tensors.down_HI, tensors.down_bias_H, communicator, backend),
    )


def _routed(
    mlp: RoutedMLP, tensors: RoutedTensors, communicator: Communicator, backend: Backend, dtype: torch.dtype
) -> RoutedExperts:
    shared = tensors.shared
    assert (mlp.shared is None) == (shared is None), "tensors do not match the layer's specification"
    weight_1H = tensors.shared_weight_1H
    experts = tensors.experts if backend.kept_codes else tensors.experts.dequantized(dtype)
    return RoutedExperts(
        route=backend.route(tensors.router),
        experts=backend.experts(experts),
        shared=None
        if mlp.shared is None or shared is None
        else DenseMLP(
            gate_up=backend.linear_of_either(shared.gate_up_IH, shared.gate_up_bias_I),
            activation=mlp.shared.activation,
            # summed over ranks together with the experts
            down=backend.linear_of_either(shared.down_HI, shared.down_bias_H),
        ),
        shared_gate=None if weight_1H is None else backend.linear(weight_1H),
        rank_sum=None if communicator.world_size == 1 else rank_sum(communicator),
    )
