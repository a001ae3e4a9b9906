"""Configuration that all trained drafters share: attention layers, taps and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..cluster.errors import CheckpointError
from ..cluster.pages.kv_cache_groups import KVCacheSpec
from .compute.checkpoint.hf_config import Json, overridden, read_json
from .compute.checkpoint.loading.read_quantization import read_quantization
from .compute.checkpoint.quantization.checkpoint_quantization import CheckpointQuantization
from .compute.checkpoint.safetensors_reader import FLOATS, INTEGERS, TensorHeaders
from .compute.layers.rope import RopeConfig

TOKEN_MAP = "d2t"  # tensor that maps the drafter's own token ids to the target's


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """Attention of one layer: causal in the block or not; window in tokens, None is unlimited."""

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Shape of a drafter of any kind and checkpoint format.

    Attributes:
        file: path of its config.json, for messages.
        target_layer_ids: tapped blocks, 0-based, in `fc`'s column order: id i is the output of block i.
        layers: attention of each layer.
        vocab_size: vocabulary of the target it was trained for.
        draft_vocab_size: rows of its own head; equals `vocab_size` unless `d2t` maps them.
        attention_bias: whether q, k, v and o have biases.
        gemma4: whether its layers are Gemma 4's: norms after attention and MLP, a factor on each layer's
            result, normed values, scores without a scale, GELU, and fp32 norm weights.
        k_is_v: whether values are the keys before norm and rotation, of one projection.
        quantization: how the checkpoint stores quantized matrices; None if none is.
    """

    file: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    target_layer_ids: tuple[int, ...]
    layers: tuple[DraftLayer, ...]
    vocab_size: int
    draft_vocab_size: int
    attention_bias: bool = False
    gemma4: bool = False
    k_is_v: bool = False
    quantization: CheckpointQuantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_geometry(self) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether its token ids must be mapped to the target's (`d2t`)."""
        return self.draft_vocab_size != self.vocab_size

    def check_token_map(self, d2t_V: Tensor) -> None:
        """Raise CheckpointError unless `d2t`, added to draft token ids, gives distinct ids of the target."""
        ids = torch.arange(len(d2t_V)) + d2t_V.long()
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size or len(ids.unique()) != len(ids):
            raise CheckpointError(
                f"{self.file}: d2t must map each draft token to a token of its own below {self.vocab_size}.",
                param="d2t",
            )


Shape = TypeVar("Shape", bound=DrafterShape)


def read_drafter(path: str | Path, overrides: Json | None, read: Callable[[Json, str], Shape]) -> Shape:
    """Return what `read` makes of a folder's config.json with `overrides`, and of the file's path.

    Adds how matrices are quantized. Raises CheckpointError, which names what is not supported.
    """
    folder, param = Path(path), "speculative_config.model"

    def read_all(raw: Json) -> Shape:
        quantization = read_quantization(raw, folder, param=param)
        return replace(read(raw, str(folder / "config.json")), quantization=quantization)

    raw = read_json(folder, param=param)
    return overridden(raw, overrides or {}, read_all, param="speculative_config.hf_overrides")


def stored_dtypes(name: str) -> tuple[str, ...]:
    """Return the dtypes, in safetensors' notation, that a drafter checkpoint may store this tensor in."""
    return INTEGERS if name == TOKEN_MAP else FLOATS


def check_tensors(found: TensorHeaders, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless all tensors are present with these shapes and a supported dtype."""
    for name, shape in shapes.items():
        found.check(name, shape, stored_dtypes(name))
    found.refuse_stray_scales(shapes)
