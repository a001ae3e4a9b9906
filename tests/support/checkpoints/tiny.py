"""Tiny random checkpoints made with transformers, which serves as the oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config

from support.checkpoints.drafters import HEADS, drafter_tensors, write_drafter, z_lab
from support.checkpoints.families import FAMILIES, TINY_VOCAB

TINY_BLOCK = 16
TINY_TAPS = (0, 1, 2)
_NOISY_BUFFERS = ("layer_scalar", "e_score_correction_bias")


def make_tiny_target(
    folder: Path, family: str, *, seed: int = 0, vocab_size: int = TINY_VOCAB, **changes: object
) -> Path:
    """A random 4-layer target (4 heads, 2 KV heads, hidden 64 or its family's) as a Hugging Face folder.

    Args:
        family: of `families.FAMILIES`.
        changes: of the family's configuration.
    """
    torch.manual_seed(seed)
    tiny = FAMILIES[family]
    common = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    keys = {key: value for key, value in {**common, **tiny.changes, **changes}.items() if value is not None}
    keys |= {"bos_token_id": None, "pad_token_id": None}
    model = tiny.model(tiny.config(**keys))
    with torch.no_grad():
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in named:
            is_buffer = name.endswith(_NOISY_BUFFERS)
            if is_buffer or (tensor.requires_grad and (tensor.dim() == 1 or name.endswith("_bias"))):
                tensor.add_(torch.randn_like(tensor) * 0.1)  # defaults of 0 and 1 hide errors
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return folder


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32, **how: object) -> PreTrainedModel:
    """transformers' model of a checkpoint folder; its Auto classes lack some multimodal ones."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype, **how)


def tiny_training_config() -> Qwen3Config:
    """The shape of the random targets in tests of training: 64 tokens, 6 layers of width 32."""
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )


def make_tiny_drafter(
    folder: Path,
    *,
    seed: int = 1,
    block_size: int = TINY_BLOCK,
    vocab_size: int = TINY_VOCAB,
    hidden_size: int = 64,
    head_dim: int = 16,
    sliding_window: int | None = None,
    second: bool = False,
    selector: bool = False,
    dspark: bool = False,
    rope_scaling: dict[str, Any] | None = None,
) -> Path:
    """A random 2-layer drafter in z-lab's format for `make_tiny_target`; the mask is the last token id.

    Args:
        sliding_window: of its first layer.
        second: whether it is a DFlash2.
        selector: whether it has a DFlash2's selector, without convolutions.
        dspark: whether it is a DSpark, in SpecForge's format; each of its rows predicts.
    """
    nested: dict[str, Any] = {"mask_token_id": vocab_size - 1, "target_layer_ids": list(TINY_TAPS)}
    kind: dict[str, Any] = {}
    if second:
        kind = {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        nested |= {"conv_kernel_size": 2, "conv_group_size": 8}
    if second or selector:
        nested |= {"selector_rank": 8, "selector_top_k": 16}
    if dspark:
        kind = {"architectures": ["DSparkDraftModel"]}
        nested |= {"projector_type": "dspark", **HEADS, "markov_rank": 8}
    config = z_lab(
        dflash=nested,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=96,
        head_dim=head_dim,
        rope_scaling=rope_scaling,
        layer_types=["sliding_attention" if sliding_window else "full_attention", "full_attention"],
        sliding_window=sliding_window,
        num_target_layers=4,
        block_size=block_size - 1 if dspark else block_size,
        torch_dtype="float32",
        **kind,
    )
    return write_drafter(folder, config, drafter_tensors(config, seed))


def changed(folder: Path, copy: Path, **changes: object) -> Path:
    """A checkpoint with changed values in its config.json; None removes a key."""
    shutil.copytree(folder, copy)
    keys = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))
    return copy
