"""Tiny targets with a layer for multi-token prediction, as their publishers store it.

The layer's block is that of transformers' one-layer model, which stays in the folder "block" as an oracle.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
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


def names_of(family: str, num_layers: int = 4) -> tuple[str, dict[str, str]]:
    """The prefix of the block's tensors, and the names of the others by part."""
    if family.startswith("qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return "mtp.layers.0.", dict(zip(PARTS, (f"mtp.{name}.weight" for name in names), strict=True))
    prefix = "model.mtp.layers.0." if family == "mimo_v2" else f"model.layers.{num_layers}."
    final = "final_layernorm" if family == "mimo_v2" else "shared_head.norm"
    names = ("enorm", "hnorm", "eh_proj", final)
    return prefix, dict(zip(PARTS, (f"{prefix}{name}.weight" for name in names), strict=True))


def make_mtp_target(folder: Path, family: str, *, seed: int = 0, **changes: object) -> Path:
    """A random target of `make_tiny_target` with the layer; `changes` are of its configuration."""
    make_tiny_target(folder, family, seed=seed, **changes)
    block = make_tiny_target(
        folder / "block", family, seed=seed + 1, num_hidden_layers=1, **changes, **BLOCKS[family]
    )
    config = json.loads((folder / "config.json").read_text())
    if not family.startswith("qwen") and family != "mimo_v2":
        config = {**config, "num_nextn_predict_layers": 1}
        config.pop("num_mtp_layers", None)
        (folder / "config.json").write_text(json.dumps(config))
    prefix, names = names_of(family)
    layer, hidden = load_file(block / "model.safetensors"), config["hidden_size"]
    generator = torch.Generator().manual_seed(seed + 2)
    stored_one = 0.0 if family.startswith("qwen") else 1.0
    tensors = load_file(folder / "model.safetensors") | {
        names["embed_norm"]: stored_one + 0.1 * torch.randn(hidden, generator=generator),
        names["hidden_norm"]: stored_one + 0.1 * torch.randn(hidden, generator=generator),
        names["combine"]: torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5,
        names["final_norm"]: layer["model.norm.weight"],
    }
    for name, tensor in layer.items():
        if name.startswith("model.layers.0."):
            own = name.removeprefix("model.layers.0.")
            if family == "mimo_v2":
                own = own.replace("post_attention_layernorm", "pre_mlp_layernorm")
            tensors[prefix + own] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
