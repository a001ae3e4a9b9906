"""Writes trained drafters as checkpoint folders in z-lab's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ....actors.targets.model.model_spec import ModelSpec
from ....drafter.compute.checkpoint.hf_config import Json
from ....drafter.dflash.checkpoint import check_drafter
from ....drafter.dflash.config import DrafterConfig
from ....drafter.eagle3.config import Eagle3Config
from ...drafters.common.format_conversion import as_z_lab
from .dflash_module import TrainableDrafter
from .initialization import facts_of


def export_drafter(model: TrainableDrafter, target: ModelSpec, folder: Path, raw: Json | None = None) -> None:
    """Write config.json and model.safetensors (bf16), without embedding and head, which are the target's.

    Other keys of `raw`, the initial drafter's config.json, are kept.
    """
    config = model.config
    write_checkpoint(folder, as_z_lab(config, raw or backbone(config, target), target), model)
    check_drafter(folder, facts_of(target))


# Any: a config is JSON.
def backbone(config: DrafterConfig | Eagle3Config, target: ModelSpec) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": target.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


# Any: a config is JSON.
def write_checkpoint(
    folder: Path, config: dict[str, Any], model: nn.Module, skipped: str | None = None
) -> None:
    """Write config.json and model.safetensors (bf16) with all tensors except `skipped`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != skipped
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
