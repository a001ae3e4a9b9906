"""A target's layer for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437) as a drafter of chains.

The checkpoint of the target holds it, and it borrows the target's embedding and head. It is applied again for
each further draft, as vLLM does; a checkpoint's second and later layers are not read.

    entry i, from token i and y of position i - 1:
    combine [norm E[token i] ; norm y] [N, 2H] --> x --the target's kind of block--> x' --norm--> y [N, H]
    y --the target's head--> logits of token i + 1

y is the target's normed hidden state for verified tokens and the layer's own past them. Entries are stored as
EAGLE-3's (`drafter/eagle3/proposer.py`): entry i at position i, none at position 0. Sharded over ranks as the
target's blocks are.

Legend: N rows, X rows of the head, H hidden, m taps (one), K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError, ConfigError
from ....cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace
from ....drafter.compute.backend import AttentionShape, Backend, ModelStackSpec, PlacedRows
from ....drafter.compute.blocks import TransformerBlock
from ....drafter.compute.checkpoint.quantized_matrix import cat_rows
from ....drafter.compute.checkpoint.safetensors_reader import TensorHeaders
from ....drafter.compute.layers.linear import HeadNorm, RMSNorm
from ....drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.target_features import TargetEmbeddings
from ....drafter.drafter_spec import DraftLayer
from .decoder import make_block
from .model_spec import ModelSpec
from .tensor_parallel import Communicator, Sharding
from .weights import TargetWeights

MTP_DRAFTS = 3  # by default: each application of the layer is further from what it was trained for


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Describes the layer to loading and memory planning, in place of a drafter's configuration.

    Attributes:
        model: the layer as a model of one block.
        target_layer_ids: the tapped block: the target's last.
        kv_geometry: K/V of a token on a rank.
    """

    model: ModelSpec
    target_layer_ids: tuple[int, ...]
    kv_geometry: KVCacheSpec
    quantization: None = None  # that of the target's checkpoint, of which this is a part

    @classmethod
    def of(cls, target: ModelSpec, num_ranks: int) -> MtpConfig:
        """Return the layer of a target. Raises ConfigError if its family or config.json has none."""
        if target.mtp is None:
            raise ConfigError(
                f'speculative_config.method="mtp": {target.architecture} has no layer for multi-token '
                "prediction here, or its config.json says that it has none. Qwen3.5, Qwen3-Next, "
                'DeepSeek-V3, GLM-4.5 and MiMo-V2 have one. Set method="suffix", which needs no model, or '
                "give a drafter.",
                param="speculative_config.method",
            )
        model = target.mtp.model(target)
        (geometry,) = Sharding(model, 0, num_ranks).kv_geometries()
        return cls(model, (target.num_layers - 1,), geometry)

    def with_window(self, window: int) -> MtpConfig:
        return replace(self, model=self.model.with_window(window))

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        return tuple(DraftLayer(causal=True, window=window) for window in self.model.windows)

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    def of_backend(self) -> ModelStackSpec:
        spec = self.model.of_backend()
        return replace(spec, name="drafter", features=spec.features | {"keys from the second position on"})


def check_has_mtp(found: TensorHeaders, target: ModelSpec, folder: object) -> None:
    """Raise CheckpointError if a target's checkpoint was published without its layer."""
    assert target.mtp is not None, "checked before"
    if not any(name.endswith(target.mtp.combine) for name in found.shapes):
        raise CheckpointError(
            f'speculative_config.method="mtp": {folder} holds no {target.mtp.combine}: this checkpoint was '
            "published without its layer for multi-token prediction. Take one that has it, or another "
            "method.",
            param="speculative_config.method",
        )


class MtpDrafter:
    """A loaded layer. Stateless: per-request state is in the pages passed to its methods.

    Args:
        weights: of `MtpConfig.model`, this rank's slices.
        target_norm_H: the target's final norm, of which the layer reads the result.
        backend: the target's.
        places: where its K and V are stored; by default in the first page group.
    """

    reads_target_kv = False

    def __init__(
        self,
        config: MtpConfig,
        weights: TargetWeights,
        target_norm_H: Tensor,
        shared_embeddings: TargetEmbeddings,
        max_positions: int,
        communicator: Communicator,
        backend: Backend,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.config = config
        self.places = tuple(places) or (LayerPlace(0, 0),)
        self._operators, self._shared_embeddings = backend, shared_embeddings
        eps = config.model.rms_norm_eps
        self._target_norm = RMSNorm(target_norm_H, eps)
        self._token_norm, self._hidden_norm, self._final_norm = (
            RMSNorm(weights.part(part), eps) for part in ("mtp_embed_norm", "mtp_hidden_norm", "final_norm")
        )
        combine_HT = weights.part("mtp_combine")
        self.dtype, self.device = combine_HT.dtype, combine_HT.device
        self._combine = backend.linear_of_either(combine_HT)
        rope = config.model.attention(0).rope
        assert rope is not None, "the families with such layers rotate all of them"
        self._rope = RotaryEmbedding(rope, max_positions, self.dtype, self.device)
        counted, backend.expert_reads = backend.expert_reads, None  # the target's counter is for its passes
        shape, block = make_block(weights, 0, self._rope_of, communicator, backend)
        assert isinstance(shape, AttentionShape), "the layer has attention"
        self._block = TransformerBlock(backend, replace(shape, first_key=1), block)
        backend.expert_reads = counted
        self._attention_norm = block.attention_norm
        self._entries = _EntryWriter(weights, shape, self._rope, backend)

    def _rope_of(self, config: RopeConfig | None) -> RotaryEmbedding | None:
        return None if config is None else self._rope

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        """Return pages for K/V of `dtype`, by default the layer's."""
        geometry = self.config.kv_geometry
        return PagedKVCache(self.places, num_pages, page_size, geometry, dtype or self.dtype, self.device)

    def features(self, taps_NmH: Tensor) -> Tensor:
        """Return the target's normed hidden states y [N, H] of its rows."""
        return self._operators.norm(self._target_norm, taps_NmH[:, 0].to(self.dtype).contiguous())

    def write_entries(self, token_ids_N: Tensor, y_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Write K and V of entries, from y of the positions before; rows at position 0 are dropped."""
        u_NH = self._operators.norm(self._attention_norm, self._inputs(token_ids_N, y_NH))
        slots_N = rows.kv_slots[cache.group(0)].masked_fill(rows.positions_N == 0, cache.skip_slot)
        cache.write(0, slots_N, self._entries.kv(u_NH, rows.positions_N))

    def forward(
        self, token_ids_N: Tensor, y_NH: Tensor, rows: PlacedRows, cache: PagedKVCache
    ) -> tuple[Tensor, Tensor]:
        """Run entries and write their K/V; return y [N, H] twice: for the next entry, and for the head.

        `y_NH` are those of the position before each row's.
        """
        x_NH = self._inputs(token_ids_N, y_NH)
        u_NH = self._operators.norm(self._attention_norm, x_NH)
        step, owners_N = self._operators.begin(rows), rows.padding_owners()
        _, normed_NH = self._block(x_NH, u_NH, step, cache, 0, self._final_norm, owners_N)
        new_NH = self._operators.as_tensor(normed_NH)
        return new_NH, new_NH

    def logits(self, y_XH: Tensor) -> Tensor:
        return self._shared_embeddings.logits(y_XH)

    def _inputs(self, token_ids_N: Tensor, y_NH: Tensor) -> Tensor:
        """Return the block's input x [N, H]."""
        token_NH = self._shared_embeddings.embed(token_ids_N).to(self.dtype)
        parts = (
            self._operators.norm(self._token_norm, token_NH),
            self._operators.norm(self._hidden_norm, y_NH),
        )
        return self._combine(torch.cat(parts, dim=-1))


class _EntryWriter:
    """Makes K and V of entries without queries, attention and MLP, which only drafting rows need."""

    def __init__(
        self, weights: TargetWeights, shape: AttentionShape, rope: RotaryEmbedding, backend: Backend
    ) -> None:
        self._shape, self._rope = shape, rope
        parts, present = weights.spec.qkv_parts(0)[1:], weights.spec.layer_parts(0)
        biases = [weights.part(f"{part}_bias") for part in parts if f"{part}_bias" in present]
        matrix = cat_rows([weights.matrix(part, 0) for part in parts], weights.dtype)
        self._project = backend.linear_of_either(matrix, torch.cat(biases) if biases else None)
        k_norm_D = shape.k_norm_D
        self._k_norm = (
            None if k_norm_D is None else HeadNorm(k_norm_D.expand(shape.num_kv_heads, -1), shape.eps)
        )

    def kv(self, u_NH: Tensor, positions_N: Tensor) -> Tensor:
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
