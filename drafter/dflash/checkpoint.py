"""Loads a DFlash drafter from a folder of safetensors.

Shapes are checked against the files' headers before any weight is read. Corrupt, missing and mismatched files
raise CheckpointErrors that name the file and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...cluster.errors import CheckpointError
from ...cluster.pages.kv_cache_groups import LayerPlace
from ..compute.backend import Backend
from ..compute.checkpoint.hf_config import Json
from ..compute.checkpoint.loading.quantized_tensors import open_folder
from ..compute.checkpoint.safetensors_reader import TensorHeaders, TensorSource
from ..drafter_spec import TOKEN_MAP, check_tensors
from ..drafter_weights import read_weights
from .config import DrafterConfig
from .dspark_heads import CONFIDENCE, MARKOV
from .model import DFlashDrafter
from .target_features import TargetEmbeddings, TargetFacts
from .weights import SELECTOR


def drafter_shapes(config: DrafterConfig, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    """Return the shape of every required tensor, by its name in all files but transformers'."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_taps * target.hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.gemma4:
        per_layer |= {f"{kind}_feedforward_layernorm.weight": (hidden,) for kind in ("pre", "post")}
        per_layer["layer_scalar"] = (1,)
    if config.k_is_v:
        del per_layer["self_attn.v_proj.weight"]
    if config.attention_bias:
        rows = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
        if config.k_is_v:
            del rows["v"]
        per_layer |= {f"self_attn.{kind}_proj.bias": (size,) for kind, size in rows.items()}
    if config.attention_sinks:
        per_layer["self_attn.attention_sink_bias"] = (config.num_heads,)
    if (size := config.convolutions) is not None:
        kernels = 2 * size.num_taps * (hidden // size.group_size)
        for name in ("attention_conv", "mlp_conv"):
            per_layer[f"{name}.base_kernel"] = (2, size.num_taps, hidden)
            per_layer[f"{name}.kernel_projection.weight"] = (kernels, hidden)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in per_layer.items()}
    if (selector := config.selector) is not None:
        shapes |= {
            f"{SELECTOR}.predecessor_codebook": (config.vocab_size, selector.rank),
            f"{SELECTOR}.successor_codebook": (config.vocab_size, selector.rank),
            f"{SELECTOR}.hidden_projection.weight": (selector.rank, hidden),
        }
    if (markov := config.markov) is not None:
        shapes |= {
            f"{MARKOV}.markov_w1.weight": (config.vocab_size, markov.rank),
            f"{MARKOV}.markov_w2.weight": (config.draft_vocab_size, markov.rank),
        }
    if config.confidence_head is not None:
        rank = markov.rank if markov is not None and config.confidence_head != "hidden" else 0
        shapes |= {f"{CONFIDENCE}.weight": (1, hidden + rank), f"{CONFIDENCE}.bias": (1,)}
    if config.maps_vocabulary:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, hidden), TOKEN_MAP: (config.draft_vocab_size,)}
    if config.layout == "assistant":
        shapes = {_OF_ASSISTANT.get(name, name): shape for name, shape in shapes.items()}
    return shapes


def stored_shapes(
    config: DrafterConfig, target: TargetFacts, found: TensorHeaders
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors to read: the required ones, and the embedding and head if present."""
    own = {
        "embed_tokens.weight": (target.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }
    return drafter_shapes(config, target) | {n: shape for n, shape in own.items() if n in found.shapes}


def check_drafter(path: str | Path, target: TargetFacts, overrides: Json | None = None) -> DrafterConfig:
    """Read the configuration (with `overrides`) and refuse what cannot work, without reading a weight."""
    config = DrafterConfig.load(path, overrides)
    config.check_fits(target)
    folder = open_folder(path, config.quantization)
    check_tensors(folder, stored_shapes(config, target, folder))
    return config


def load_drafter(
    path: str | Path,
    target: TargetFacts,
    shared_embeddings: TargetEmbeddings,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    places: Sequence[LayerPlace] = (),
    *,
    overrides: Json | None = None,
    input_embedding_scale: float | None = None,
) -> DFlashDrafter:
    """Check and load a drafter of any format.

    Args:
        shared_embeddings: the target's embedding and head, used where the checkpoint has none of its own.
        input_embedding_scale: replaces the checkpoint's value.
    """
    config = check_drafter(path, target, overrides)
    tensors = open_folder(path, config.quantization, dtype)
    place = (target, shared_embeddings, dtype, device, backend, places)
    return make_drafter(config, tensors, *place, input_embedding_scale=input_embedding_scale)


def make_drafter(
    config: DrafterConfig,
    tensors: TensorSource,
    target: TargetFacts,
    shared_embeddings: TargetEmbeddings,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    places: Sequence[LayerPlace] = (),
    *,
    input_embedding_scale: float | None = None,
) -> DFlashDrafter:
    """Build a drafter from tensors with the shapes of `drafter_shapes`. Arguments: see `load_drafter`."""
    config = _scaled_like(config, target, dtype, input_embedding_scale)
    own = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in tensors.shapes]
    names = {named_as_ours(name): name for name in (*drafter_shapes(config, target), *own)}
    if config.maps_vocabulary:
        config.check_token_map(tensors.get(TOKEN_MAP))
    weights = read_weights(tensors, names, dtype, device, backend)
    if config.mask_embedding:
        weights = weights.adding(mask_embedding=_mask_embedding(config).to(device=device, dtype=dtype))
    positions = target.max_model_len + config.block_size
    return DFlashDrafter(config, weights, shared_embeddings, positions, backend, places)


def _scaled_like(
    config: DrafterConfig, target: TargetFacts, dtype: torch.dtype, wanted: float | None
) -> DrafterConfig:
    """Set the input scale: the requested, else the checkpoint's, else the target's (rounded)."""
    scale = config.input_embedding_scale if wanted is None else wanted
    if scale is None:
        scale = float(torch.tensor(target.embed_scale, dtype=dtype))
    return replace(config, input_embedding_scale=scale)


# z-lab's tensor names to transformers' where they differ, and the inverse.
_OF_ASSISTANT = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_OURS = {theirs: ours for ours, theirs in _OF_ASSISTANT.items()}


def named_as_ours(name: str) -> str:
    """Return the name that z-lab and Speculators use for a tensor of any format."""
    return _OURS.get(name, name)


def _mask_embedding(config: DrafterConfig) -> Tensor:
    file = Path(config.file).with_name("mask_embedding.pt")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds; all of them mean the same to the user
        raise CheckpointError(f"{file} cannot be read ({error}); download again.") from None
    if isinstance(found, dict) and len(found) == 1:
        found = next(iter(found.values()))
    if not isinstance(found, Tensor) or found.numel() != config.hidden_size:
        raise CheckpointError(f"{file} must hold one vector of hidden_size {config.hidden_size}.")
    return found.reshape(-1)
