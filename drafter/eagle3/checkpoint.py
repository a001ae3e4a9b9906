"""Loads an EAGLE-3 drafter from a folder of safetensors.

Files may spell `layers.0.` as `midlayer.` and may prefix names with `model.`. Shapes are checked against the
files' headers before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...cluster.pages.kv_cache_groups import LayerPlace
from ..compute.backend import Backend
from ..compute.checkpoint.hf_config import Json
from ..compute.checkpoint.loading.quantized_tensors import open_folder
from ..compute.checkpoint.safetensors_reader import TensorHeaders, TensorSource
from ..dflash.target_features import TargetEmbeddings, TargetFacts
from ..drafter_spec import TOKEN_MAP, check_tensors
from ..drafter_weights import read_weights
from .config import Eagle3Config
from .model import LAYER, Eagle3Drafter

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def eagle3_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every required tensor, by Manta's name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    fused = config.num_taps * config.target_hidden_size
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{kind}_proj.weight": (size, 2 * hidden) for kind, size in rows.items()},
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        of_layer |= {f"self_attn.{kind}_proj.bias": (size,) for kind, size in rows.items()}
        of_layer["self_attn.o_proj.bias"] = (hidden,)
    if config.head_norms:
        of_layer |= {f"self_attn.{kind}_norm.weight": (dim,) for kind in "qk"}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        **{f"{LAYER}{name}": shape for name, shape in of_layer.items()},
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.maps_vocabulary:
        shapes |= {HEAD: (config.draft_vocab_size, hidden), TOKEN_MAP: (config.draft_vocab_size,)}
    if hidden != config.target_hidden_size:  # then it cannot borrow the target's
        shapes |= {HEAD: (config.draft_vocab_size, hidden), EMBEDDING: (config.vocab_size, hidden)}
    return shapes


def check_eagle3(path: str | Path, target: TargetFacts, overrides: Json | None = None) -> Eagle3Config:
    """Read the configuration (with `overrides`) and refuse what cannot work, without reading a weight."""
    config = Eagle3Config.load(path, target.num_layers, overrides)
    config.check_fits(target)
    check_eagle3_tensors(config, open_folder(path, config.quantization))
    return config


def check_eagle3_tensors(config: Eagle3Config, found: TensorHeaders) -> None:
    """Raise CheckpointError for the first tensor that is missing, misshapen or quantized."""
    own: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.draft_vocab_size, config.hidden_size),
    }
    needed = eagle3_shapes(config)
    spelled = {_spelled(name, found.shapes): (name, shape) for name, shape in {**own, **needed}.items()}
    check_tensors(
        found,
        {
            theirs: shape
            for theirs, (name, shape) in spelled.items()
            if name in needed or theirs in found.shapes
        },
    )


def load_eagle3(
    path: str | Path,
    target: TargetFacts,
    shared_embeddings: TargetEmbeddings,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    places: Sequence[LayerPlace] = (),
    *,
    overrides: Json | None = None,
) -> Eagle3Drafter:
    """Check and load a drafter; `shared_embeddings` replaces an embedding or head that it lacks."""
    config = check_eagle3(path, target, overrides)
    tensors = open_folder(path, config.quantization, dtype)
    return make_eagle3(config, tensors, target, shared_embeddings, dtype, device, backend, places)


def make_eagle3(
    config: Eagle3Config,
    tensors: TensorSource,
    target: TargetFacts,
    shared_embeddings: TargetEmbeddings,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    places: Sequence[LayerPlace] = (),
) -> Eagle3Drafter:
    """Build a drafter from tensors with the shapes of `eagle3_shapes`. Arguments: see `load_eagle3`."""
    spelled = {name: _spelled(name, tensors.shapes) for name in (*eagle3_shapes(config), EMBEDDING, HEAD)}
    spelled = {name: theirs for name, theirs in spelled.items() if theirs in tensors.shapes}
    if config.maps_vocabulary:
        config.check_token_map(tensors.get(spelled[TOKEN_MAP]))
    weights = read_weights(tensors, spelled, dtype, device, backend)
    return Eagle3Drafter(config, weights, shared_embeddings, target.max_model_len, backend, places)


def _spelled(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = (name, name.replace(LAYER, "midlayer.", 1))
    return next((f"{at}{each}" for at in ("", "model.") for each in names if f"{at}{each}" in shapes), name)
