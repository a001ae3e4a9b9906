"""Checkpoints of gpt-oss as they are published: packed MXFP4 experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# openai/gpt-oss-20b's, but for what says nothing of the model.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


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
    keys["quantization_config"] = GPT_OSS_20B["quantization_config"]
    (folder / "config.json").write_text(json.dumps(keys))
    return folder
