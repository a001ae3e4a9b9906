"""Tiny targets with a layer for multi-token prediction, as published, and an assistant of Gemma 4.

The layer's block is that of transformers' one-layer model, which stays in the folder "block" as an oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.checkpoints.tiny import make_tiny_target

_QWEN = {"full_attention_interval": 1}
# Changes of a family's configuration for the layer's block.
BLOCKS: dict[str, dict] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": {**_QWEN, "mlp_only_layers": []},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "mimo_v2": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}
PARTS = ("embed_norm", "hidden_norm", "combine", "final_norm")


def names_of(family: str, layer: int = 0, num_layers: int = 4) -> tuple[str, dict[str, str]]:
    """The prefix of a layer's block's tensors, and the names of the others by part."""
    if family.startswith("qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return "mtp.layers.0.", dict(zip(PARTS, (f"mtp.{name}.weight" for name in names), strict=True))
    prefix = f"model.mtp.layers.{layer}." if family == "mimo_v2" else f"model.layers.{num_layers}."
    final = "final_layernorm" if family == "mimo_v2" else "shared_head.norm"
    names = ("enorm", "hnorm", "eh_proj", final)
    return prefix, dict(zip(PARTS, (f"{prefix}{name}.weight" for name in names), strict=True))


def make_mtp_target(
    folder: Path, family: str, *, seed: int = 0, num_mtp_layers: int = 1, **changes: Any
) -> Path:
    """A random target of `make_tiny_target` with such layers; `changes` are of its configuration."""
    make_tiny_target(folder, family, seed=seed, **changes)
    config = json.loads((folder / "config.json").read_text())
    if not family.startswith("qwen") and family != "mimo_v2":
        config = {**config, "num_nextn_predict_layers": 1}
        config.pop("num_mtp_layers", None)
        (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(num_mtp_layers):
        block = folder / block_of(layer)
        of_block = {**changes, **BLOCKS[family], "num_hidden_layers": 1}
        make_tiny_target(block, family, seed=seed + 1 + 10 * layer, **of_block)
        tensors |= _mtp_tensors(
            load_file(block / "model.safetensors"), family, layer, config["hidden_size"], seed
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def block_of(layer: int) -> str:
    """The folder of a layer's block in its target's."""
    return f"block{layer or ''}"


def _mtp_tensors(
    block: dict[str, torch.Tensor], family: str, layer: int, hidden: int, seed: int
) -> dict[str, torch.Tensor]:
    prefix, names = names_of(family, layer)
    generator = torch.Generator().manual_seed(seed + 2 + 10 * layer)
    stored_one = 0.0 if family.startswith("qwen") else 1.0
    tensors = {
        names["embed_norm"]: stored_one + 0.1 * torch.randn(hidden, generator=generator),
        names["hidden_norm"]: stored_one + 0.1 * torch.randn(hidden, generator=generator),
        names["combine"]: torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5,
        names["final_norm"]: block["model.norm.weight"],
    }
    for name, tensor in block.items():
        if name.startswith("model.layers.0."):
            own = name.removeprefix("model.layers.0.")
            if family == "mimo_v2":
                own = own.replace("post_attention_layernorm", "pre_mlp_layernorm")
            tensors[prefix + own] = tensor
    return tensors


_CLUSTER_KEYS = "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"


def make_assistant(
    folder: Path,
    target: Path,
    *,
    seed: int = 3,
    unified: bool = False,
    clusters: tuple[int, int] | None = None,
    **changes: object,
) -> Path:
    """A random assistant of two sliding layers and a full one, by transformers' class, for a tiny Gemma 4.

    Args:
        unified: whether it is of the classes of Gemma 4 12B.
        clusters: of its vocabulary, how many there are and how many are possible, as with E2B's.
        changes: of its text part's configuration.
    """
    torch.manual_seed(seed)
    theirs = json.loads((target / "config.json").read_text())
    full = {"head_dim": 32, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    shared = ("vocab_size", "sliding_window", "head_dim", "num_key_value_heads", "rope_parameters")
    text = {
        **{key: theirs[key] for key in (*shared, "max_position_embeddings", "attention_k_eq_v")},
        **{"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "rms_norm_eps": 1e-6},
        **{"num_hidden_layers": len(kinds), "num_kv_shared_layers": len(kinds), "layer_types": kinds},
        **{"per_layer_config": {2: full}, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        **{"bos_token_id": None, "pad_token_id": None, "eos_token_id": 0, "initializer_range": 0.08},
        **changes,
    }
    kind = "Gemma4Unified" if unified else "Gemma4"
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=getattr(transformers, f"{kind}TextConfig")(**text),
        backbone_hidden_size=theirs["hidden_size"],
        dtype="float32",
        **({} if clusters is None else dict(zip(_CLUSTER_KEYS, (True, *clusters), strict=True))),
    )
    model = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
    if clusters is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(theirs["vocab_size"]))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if "scalar" in name)):
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder
