"""A target's layers for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437) as a drafter of chains.

The checkpoint of the target holds them, and they borrow the target's embedding and head. A single layer is
applied again for each further draft, as vLLM does. Of several layers (MiMo-V2), layer k makes draft k, as in
SGLang.

    entry i of layer k, from token i and y of position i - 1 - k:
    combine [norm E[token i] ; norm y] [N, 2H] --> x --the target's kind of block--> x' --norm--> y' [N, H]
    y' --the target's head--> logits of token i + 1

y is the target's normed hidden state for verified tokens. Past them a single layer's own y' takes its place.
Several layers do not need it: draft k is made at position n + k, after the anchor n, and its pass runs layer
k's entries from n on, which no earlier pass has made. Entries are stored as EAGLE-3's
(`drafter/eagle3/proposer.py`): entry i at position i, none at the first k + 1 positions. Sharded over ranks
as the target's blocks are.

Legend: N rows, X rows of the head, H hidden, m taps (one), K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Self

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError, ConfigError
from ....cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace
from ....drafter.compute.backend import Backend, ModelStackSpec, PlacedRows
from ....drafter.compute.block_weights import AttentionShape
from ....drafter.compute.blocks import TransformerBlock
from ....drafter.compute.checkpoint.quantized_matrix import cat_rows
from ....drafter.compute.checkpoint.safetensors_reader import TensorHeaders
from ....drafter.compute.layers.linear import HeadNorm, RMSNorm
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.target_features import TargetEmbeddings
from ....drafter.drafter_spec import DraftLayer
from .decoder import RopeOf, make_block
from .model_spec import ModelSpec
from .tensor_parallel import Communicator, Sharding
from .weights import TargetWeights

MTP_DRAFTS = 3  # by default: each application of the layer is further from what it was trained for


@dataclass(frozen=True, slots=True)
class ChainLayersConfig:
    """Describes layers of a target's kind to loading and memory planning, in place of a drafter's config.

    Attributes:
        model: the layers as a model with a block for each.
        target_layer_ids: the tapped block: the target's last.
        kv_geometry: K/V of a token on a rank.
    """

    model: ModelSpec
    target_layer_ids: tuple[int, ...]
    kv_geometry: KVCacheSpec

    def with_window(self, window: int) -> Self:
        return replace(self, model=self.model.with_window(window))

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        return tuple(DraftLayer(causal=True, window=window) for window in self.model.windows)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers


@dataclass(frozen=True, slots=True)
class MtpConfig(ChainLayersConfig):
    quantization: None = None  # that of the target's checkpoint, of which this is a part

    @classmethod
    def of(cls, target: ModelSpec, num_ranks: int, num_layers: int | None = None) -> MtpConfig:
        """Return the layers of a target. Raises ConfigError if its family or config.json has none.

        `num_layers`: by default as many as published checkpoints of the family have.
        """
        if target.mtp is None:
            raise ConfigError(
                f'speculative_config.method="mtp": {target.architecture} has no layer for multi-token '
                "prediction here, or its config.json says that it has none. Qwen3.5, Qwen3-Next, "
                'DeepSeek-V3, GLM-4.5 and MiMo-V2 have one. Set method="suffix", which needs no model, or '
                "give a drafter.",
                param="speculative_config.method",
            )
        model = target.mtp.model(target, num_layers or target.mtp.num_layers)
        geometry = Sharding(model, 0, num_ranks).kv_geometries()[0]
        return cls(model, (target.num_layers - 1,), geometry)

    @property
    def hidden_size(self) -> int:
        """Size of what is kept for a page: the states of as many positions as there are layers."""
        return self.model.hidden_size * self.num_layers

    def stack_spec(self) -> ModelStackSpec:
        spec = self.model.stack_spec()
        return replace(spec, name="drafter", features=spec.features | {"keys from the second position on"})


def count_mtp_layers(found: TensorHeaders, target: ModelSpec, folder: object) -> int:
    """Return the number of layers in a target's checkpoint. Raises CheckpointError if there is none."""
    assert target.mtp is not None, "checked before"
    name = target.mtp.combine
    numbers = count() if "{layer}" in name else range(1)

    def is_present(layer: int) -> bool:
        return any(each.endswith(name.format(layer=layer)) for each in found.shapes)

    num_layers = len(list(takewhile(is_present, numbers)))
    if not num_layers:
        raise CheckpointError(
            f'speculative_config.method="mtp": {folder} holds no {name.format(layer=0)}: this checkpoint was '
            "published without its layer for multi-token prediction. Take one that has it, or another "
            "method.",
            param="speculative_config.method",
        )
    return num_layers


class MtpDrafter:
    """The loaded layers. Stateless: per-request state is in the pages passed to its methods.

    Args:
        weights: of `MtpConfig.model`, this rank's slices.
        target_norm_H: the target's final norm, of which the layers read the result.
        backend: the target's.
        places: where K and V of each layer are stored; by default in the first page group.
    """

    reads_target_kv = False

    def __init__(
        self,
        config: MtpConfig,
        weights: TargetWeights,
        target_norm_H: Tensor,
        shared_embeddings: TargetEmbeddings,
        rope_of: RopeOf,
        communicator: Communicator,
        backend: Backend,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.config = config
        self.has_layer_per_draft = config.num_layers > 1
        self.places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(config.num_layers))
        self._operators, self._shared_embeddings = backend, shared_embeddings
        self._target_norm = RMSNorm(target_norm_H, config.model.rms_norm_eps)
        counted, backend.expert_reads = backend.expert_reads, None  # the target's counter is for its passes
        self._layers = [
            _MtpLayer(weights, layer, rope_of, communicator, backend) for layer in range(config.num_layers)
        ]
        backend.expert_reads = counted
        self.dtype, self.device = weights.dtype, target_norm_H.device
        self._kv_scales = weights.kv_scales()

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        """Return pages for K/V of `dtype`, by default the layers'."""
        sizes, scales = (self.places, num_pages, page_size, self.config.kv_geometry), self._kv_scales
        return PagedKVCache(*sizes, dtype or self.dtype, self.device, scales=scales)

    def features(self, taps_NmH: Tensor) -> Tensor:
        """Return the target's normed hidden states y [N, H] of its rows."""
        return self._operators.norm(self._target_norm, taps_NmH[:, 0].to(self.dtype).contiguous())

    def write_entries(self, token_ids_N: Tensor, y_NT: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Write K and V of all layers' entries; rows without a state, at the first positions, are dropped.

        `y_NT` are y of the positions before, newest first, side by side: one for each layer.
        """
        token_NH, states = self._embed(token_ids_N), y_NT.chunk(len(self._layers), 1)
        for number, (layer, y_NH) in enumerate(zip(self._layers, states, strict=True)):
            is_dropped_N = rows.positions_N <= number
            slots_N = rows.kv_slots[cache.group(number)].masked_fill(is_dropped_N, cache.skip_slot)
            cache.write(number, slots_N, layer.entries(token_NH, y_NH, rows.positions_N))

    def forward(
        self, token_ids_N: Tensor, y_NH: Tensor, rows: PlacedRows, cache: PagedKVCache, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run entries and write their K/V; return y' [N, H] twice: for the next entry, and for the head.

        Args:
            y_NH: of the position before each row's; of layer k of several, k positions further back.
            depth: of the draft that is made.
        """
        number = depth if self.has_layer_per_draft else 0
        layer = self._layers[number]
        new_NH = layer(self._embed(token_ids_N), y_NH, rows, cache, number)
        return new_NH, new_NH

    def logits(self, y_XH: Tensor) -> Tensor:
        return self._shared_embeddings.logits(y_XH)

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        return self._shared_embeddings.embed(token_ids_N).to(self.dtype)


class _MtpLayer:
    """One layer: two norms, their combination, a block and a norm."""

    def __init__(
        self,
        weights: TargetWeights,
        layer: int,
        rope_of: RopeOf,
        communicator: Communicator,
        backend: Backend,
    ) -> None:
        self._operators, eps = backend, weights.spec.rms_norm_eps
        self._token_norm, self._hidden_norm, self._final_norm = (
            RMSNorm(weights.part(part, layer), eps)
            for part in ("mtp_embed_norm", "mtp_hidden_norm", "final_norm")
        )
        self._combine = backend.linear_of_either(weights.part("mtp_combine", layer))
        shape, block = make_block(weights, layer, rope_of, communicator, backend)
        assert isinstance(shape, AttentionShape), "the layer has attention"
        self._block = TransformerBlock(backend, replace(shape, first_key=1 + layer), block)
        self._attention_norm = block.attention_norm
        self._kv = _EntryWriter(weights, layer, shape, backend)

    def __call__(
        self, token_NH: Tensor, y_NH: Tensor, rows: PlacedRows, cache: PagedKVCache, layer: int
    ) -> Tensor:
        """Run entries, write their K and V, and return y' [N, H]."""
        x_NH = self._inputs(token_NH, y_NH)
        u_NH = self._operators.norm(self._attention_norm, x_NH)
        step, owners_N = self._operators.begin(rows), rows.padding_owners()
        _, normed_NH = self._block(x_NH, u_NH, step, cache, layer, self._final_norm, owners_N)
        return self._operators.as_tensor(normed_NH)

    def entries(self, token_NH: Tensor, y_NH: Tensor, positions_N: Tensor) -> Tensor:
        """Return K and V of entries, as a cache stores them."""
        u_NH = self._operators.norm(self._attention_norm, self._inputs(token_NH, y_NH))
        return self._kv(u_NH, positions_N)

    def _inputs(self, token_NH: Tensor, y_NH: Tensor) -> Tensor:
        """Return the block's input x [N, H]."""
        norm = self._operators.norm
        normed = norm(self._token_norm, token_NH), norm(self._hidden_norm, y_NH.contiguous())
        return self._combine(torch.cat(normed, dim=-1))


class _EntryWriter:
    """Makes K and V of entries without queries, attention and MLP, which only drafting rows need."""

    def __init__(self, weights: TargetWeights, layer: int, shape: AttentionShape, backend: Backend) -> None:
        assert shape.rope is not None, "the families with such layers rotate all of them"
        self._shape, self._rope = shape, shape.rope
        parts, present = weights.spec.qkv_parts(layer)[1:], weights.spec.layer_parts(layer)
        biases = [weights.part(f"{part}_bias", layer) for part in parts if f"{part}_bias" in present]
        matrix = cat_rows([weights.matrix(part, layer) for part in parts], weights.dtype)
        self._project = backend.linear_of_either(matrix, torch.cat(biases) if biases else None)
        k_norm_D = shape.k_norm_D
        self._k_norm = (
            None if k_norm_D is None else HeadNorm(k_norm_D.expand(shape.num_kv_heads, -1), shape.eps)
        )

    def __call__(self, u_NH: Tensor, positions_N: Tensor) -> Tensor:
        """Return what a cache stores of these rows: keys and values, or latents with their keys."""
        shape, kv_NO, rotation = self._shape, self._project(u_NH), self._rope.at(positions_N)
        if (latent := shape.latent) is not None:
            kv_NO[:, : latent.rank] = latent.kv_norm(kv_NO[:, : latent.rank].contiguous())
            k_N1R = kv_NO[:, None, latent.rank :]
            rotation.rotate(k_N1R.clone(), out_NJD=k_N1R)
            return kv_NO
        k_NKD = kv_NO[:, : shape.num_kv_heads * shape.head_dim].unflatten(-1, (-1, shape.head_dim))
        normed_NKD = k_NKD if self._k_norm is None else self._k_norm(k_NKD)
        rotation.rotate(normed_NKD, out_NJD=k_NKD)
        return kv_NO
