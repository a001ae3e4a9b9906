"""Checkpoints with scales for K/V in FP8, and transformers' logits with K and V rounded by them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from support.checkpoints.tiny import transformers_model
from support.oracles.quantized_checkpoints import publish

LARGEST = 448.0
# Scales of K and V by layer: the largest values of the last two layers are clamped.
SCALES = ((0.013, 0.0021), (0.25, 0.5), (0.0037, 0.0006), (0.002, 0.0013))
DECLARED = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
# Suffixes after a layer's attention module.
COMPRESSED_TENSORS = ("k_scale", "v_scale")
MODELOPT = ("k_proj.k_scale", "v_proj.v_scale")
OUTPUTS = ("k_proj.output_scale", "v_proj.output_scale")


def publish_with_kv_scales(saved: Path, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint in FP8 with `SCALES`, and one with the numbers of its matrices."""
    quantized, plain = publish(saved, folder, "ct_fp8_channel")
    return with_kv_scales(quantized, folder / "scaled"), plain


def with_kv_scales(
    quantized: Path,
    folder: Path,
    names: Sequence[str] = COMPRESSED_TENSORS,
    *,
    scales: Sequence[Sequence[float | torch.Tensor]] = SCALES,
    declared: Any = DECLARED,
) -> Path:
    """Copy a quantized checkpoint with scales of K and V by layer, and what config.json declares of them."""
    shutil.copytree(quantized, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=False):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.as_tensor(scale).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = declared
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class RoundedCache(DynamicCache):
    """transformers' cache with K and V as FP8 stores them."""

    def __init__(self, scales: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._of_layers = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (
            rounded(states, scale)
            for states, scale in zip((key_states, value_states), self._of_layers[layer_idx], strict=True)
        )
        return super().update(k, v, layer_idx, *rest, **more)


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    divided = values.float() / torch.tensor(scale)
    return divided.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype) * scale


@torch.no_grad()
def rounded_oracle(
    plain: Path, tokens: list[int], scales: Sequence[Sequence[float]] = SCALES
) -> torch.Tensor:
    """Return the logits [N, V] of plain weights with rounded K and V."""
    return transformers_model(plain)(torch.tensor([tokens]), past_key_values=RoundedCache(scales)).logits[0]
