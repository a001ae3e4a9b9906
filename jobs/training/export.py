"""The trained pair as checkpoint folders: Hugging Face's layout for the target, z-lab's for the drafter."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from .model import TrainableDrafter
from .tokenizer import MAX_CONTEXT_TOKENS, VOCAB_SIZE


def export_target(model: Qwen3ForCausalLM, folder: Path) -> None:
    """config.json and model.safetensors (bf16); the tied head is not stored twice."""
    config = model.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_theta": rope_theta(model.config),
        "rope_scaling": None,
        "use_cache": True,
    }
    config.pop("_name_or_path", None)
    _write(folder, config, model, skipped="lm_head.weight")


def export_drafter(model: TrainableDrafter, num_target_layers: int, mask_token_id: int, folder: Path) -> None:
    """config.json and model.safetensors (bf16), without embedding and head: those are the target's."""
    shape = model.shape
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * shape.num_layers,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }
    _write(folder, config, model)


def rope_theta(config: Qwen3Config) -> float:
    rope = config.rope_parameters or {}
    theta = rope.get("rope_theta")
    assert isinstance(theta, float), "target_config sets it"
    return theta


# Any: a config is JSON.
def _write(folder: Path, config: dict[str, Any], model: nn.Module, skipped: str | None = None) -> None:
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
