"""Checkpoints of gpt-oss as they are published: packed MXFP4 experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def publish(saved: Path, folder: Path) -> Path:
    """A transformers checkpoint in the Hub's form: experts packed (at random), bf16, two shards."""
    generator = torch.Generator().manual_seed(3)

    def some_bytes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = experts, outputs, inputs // 32
            tensors[f"{name}_blocks"] = some_bytes(0, 256, *blocks, 16)
            tensors[f"{name}_scales"] = some_bytes(122, 126, *blocks)
        else:
            tensors[name] = tensor.bfloat16()
    folder.mkdir()
    names, files = sorted(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    file_of = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    keys = json.loads((saved / "config.json").read_text())
    rope = keys.pop("rope_parameters")
    for key in ("dtype", "swiglu_alpha"):
        del keys[key]
    keys |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    keys["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder
