"""Random EAGLE-3 checkpoints for the tiny targets, in both formats and all variants."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.checkpoints.tiny import TINY_VOCAB

BLOCK = {
    "model_type": "llama",
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32,  # shorter than the served length, as in published files
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DRAFT_VOCAB = 96


def sglang(**changes) -> dict:
    """The original layout; taps as SGLang counts them: outputs of these blocks."""
    top = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    inside = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
    return {**BLOCK, **top, **inside, **changes}


def speculators(*, layer: dict | None = None, **changes) -> dict:
    """The same in Speculators' format: the block is nested, taps are inputs of these blocks."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {**BLOCK, **(layer or {})},
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "speculators_config": {"algorithm": "eagle3"},
        **changes,
    }


VARIANTS: dict[str, dict] = {
    "sglang": sglang(),
    "sglang whole vocabulary, lent head": sglang(draft_vocab_size=None),
    "sglang vLLM's ids": sglang(eagle_config=None, eagle_aux_hidden_state_layer_ids=[3, 1, 2]),
    "sglang biases": sglang(attention_bias=True),
    "speculators": speculators(),
    "speculators of a Qwen3": speculators(layer={"model_type": "qwen3"}, norm_before_residual=True),
    "speculators normed before fc": speculators(norm_before_fc=True, norm_before_residual=True),
    "speculators narrower": speculators(layer={"hidden_size": 32}, target_hidden_size=64),
}


def random_tensors(config: dict, seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights, scaled so that logits differ but do not explode."""
    raw = config.get("transformer_layer_config", config)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    sizes = {"q": raw["num_attention_heads"] * dim, "k": raw["num_key_value_heads"] * dim}
    sizes["v"], wide = sizes["k"], config.get("target_hidden_size", hidden) * 3
    at = "layers.0." if config is not raw else "midlayer."
    tensors = {"fc.weight": matrix(hidden, wide), "norm.weight": norm(hidden)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{at}{name}.weight"] = norm(hidden)
    for name, size in sizes.items():
        tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(size, 2 * hidden)
    tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, sizes["q"])
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        tensors[f"{at}mlp.{name}_proj.weight"] = matrix(rows, columns)
    if raw["attention_bias"]:
        tensors |= {f"{at}self_attn.{k}_proj.bias": norm(n) - 1 for k, n in {**sizes, "o": hidden}.items()}
    if raw["model_type"] == "qwen3":
        tensors |= {f"{at}self_attn.{kind}_norm.weight": norm(dim) for kind in "qk"}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(wide)
    if hidden != config.get("target_hidden_size", hidden):
        tensors["embed_tokens.weight"] = matrix(raw["vocab_size"], hidden)
    if (draft := config.get("draft_vocab_size")) is not None:
        chosen = torch.randperm(raw["vocab_size"], generator=generator)[:draft].sort().values
        tensors |= {
            "lm_head.weight": matrix(draft, hidden) * 3,
            "d2t": chosen - torch.arange(draft),
            "t2d": torch.isin(torch.arange(raw["vocab_size"]), chosen),
        }
    return tensors


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder
