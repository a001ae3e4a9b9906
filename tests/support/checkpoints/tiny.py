"""Tiny random checkpoints made with transformers, which serves as the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3Config

from support.checkpoints.families import FAMILIES

TINY_VOCAB = 128
TINY_BLOCK = 16
TINY_TAPS = (0, 1, 2)
_NOISY_BUFFERS = ("layer_scalar", "e_score_correction_bias")
TINY_SELECTOR = {"selector_rank": 8, "selector_top_k": 16}
TINY_HEADS = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}
TINY_SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, **TINY_SELECTOR}


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


def transformers_model(folder: Path, **how: object) -> PreTrainedModel:
    """transformers' model of a checkpoint folder; its Auto classes lack some multimodal ones."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **how)


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
    rope_scaling: dict | None = None,
) -> Path:
    """A random 2-layer drafter in z-lab's format for `make_tiny_target`; the mask is the last token id.

    Args:
        sliding_window: of its first layer.
        second: whether it is a DFlash2.
        selector: whether it has a DFlash2's selector, without convolutions.
        dspark: whether it is a DSpark, in SpecForge's format; each of its rows predicts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["sliding_attention" if sliding_window else "full_attention", "full_attention"],
        "sliding_window": sliding_window,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "num_target_layers": 4,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": list(TINY_TAPS)},
        "torch_dtype": "float32",
    }
    if second:
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        config["dflash_config"] |= TINY_SECOND
    if selector:
        config["dflash_config"] |= TINY_SELECTOR
    if dspark:
        config |= {"architectures": ["DSparkDraftModel"], "block_size": block_size - 1}
        config["dflash_config"] |= {"projector_type": "dspark", **TINY_HEADS}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_tiny_drafter_tensors(config, seed), folder / "model.safetensors")
    return folder


def _tiny_drafter_tensors(config: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(TINY_TAPS) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(hidden),
            f"{at}.post_attention_layernorm.weight": norm(hidden),
            f"{at}.self_attn.q_proj.weight": matrix(heads * dim, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv_heads * dim, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, heads * dim),
            f"{at}.self_attn.q_norm.weight": norm(dim),
            f"{at}.self_attn.k_norm.weight": norm(dim),
            f"{at}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    if "selector_rank" in config["dflash_config"]:
        tensors |= _selector_tensors(config, matrix)
    if (rank := config["dflash_config"].get("markov_rank")) is not None:
        tensors |= {
            "markov_head.markov_w1.weight": matrix(config["vocab_size"], rank),
            "markov_head.markov_w2.weight": matrix(config["vocab_size"], rank),
            "confidence_head.proj.weight": matrix(1, hidden + rank),
            "confidence_head.proj.bias": torch.zeros(1),
        }
    if "conv_kernel_size" in config["dflash_config"]:
        tensors |= _convolution_tensors(config, matrix)
    return tensors


def _selector_tensors(config: dict, matrix: Callable[[int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    rank, vocab = config["dflash_config"]["selector_rank"], config["vocab_size"]
    return {
        "candidate_selector.predecessor_codebook": matrix(vocab, rank),
        "candidate_selector.successor_codebook": matrix(vocab, rank),
        "candidate_selector.hidden_projection.weight": matrix(rank, config["hidden_size"]),
    }


def _convolution_tensors(config: dict, matrix: Callable[[int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    keys, hidden = config["dflash_config"], config["hidden_size"]
    taps, tensors = keys["conv_kernel_size"], {}
    for i in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            kernels = 2 * taps * hidden // keys["conv_group_size"]
            tensors[f"layers.{i}.{name}.base_kernel"] = matrix(2 * taps, hidden).view(2, taps, hidden) * 4
            tensors[f"layers.{i}.{name}.kernel_projection.weight"] = matrix(kernels, hidden) * 0.3
    return tensors


def changed(folder: Path, copy: Path, **changes: object) -> Path:
    """A checkpoint with changed values in its config.json; None removes a key."""
    shutil.copytree(folder, copy)
    keys = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))
    return copy
