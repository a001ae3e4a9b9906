"""Random drafter checkpoints of all kinds, formats and variants: their configurations and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.checkpoints.families import TINY_VOCAB

Config = dict[str, Any]  # Any: JSON

VOCAB, HIDDEN, TARGET_LAYERS = 96, 32, 6
BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
}


def z_lab(**changes: Any) -> Config:
    """A raw config; keys of `dflash_config` go into `dflash`."""
    nested = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], **changes.pop("dflash", {})}
    top = {"architectures": ["DFlashDraftModel"], "num_target_layers": TARGET_LAYERS, "block_size": 16}
    return {**BACKBONE, **top, **changes, "dflash_config": nested}


def speculators(*, layer: Config | None = None, **changes: Any) -> Config:
    """The same drafter in Speculators' format: ids one higher, backbone nested."""
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {**BACKBONE, **(layer or {})},
        "draft_vocab_size": VOCAB,
        "block_size": 16,
        "mask_token_id": 90,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "speculators_config": {"algorithm": "dflash"},
        **changes,
    }


def assistant(**changes: Any) -> Config:
    """transformers' own format: z-lab's keys at the top, all sliding layers bidirectional."""
    top = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    keys = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], "block_size": 16}
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    return {**BACKBONE, **sliding, **top, **keys, **changes}


HEADS = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}


def deepspec(**changes: Any) -> Config:
    """DeepSpec's format of a DSpark drafter: all keys at the top; the anchor's row predicts, too."""
    kind = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": TARGET_LAYERS, "block_size": 15}
    keys = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], "num_anchors": 512}
    return {**BACKBONE, **kind, **keys, **HEADS, "markov_head_type": "vanilla", **changes}


def deepspec_gemma4(**changes: Any) -> Config:
    """DeepSpec's format for Gemma 4, with the keys of the published file; most are of sliding layers."""
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": full, "sliding_attention": sliding, "rope_theta": None, "rope_type": "default"}
    text = {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": ropes}
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    text |= {"layer_types": ["full_attention"] * 2, "sliding_window": 1024, "final_logit_softcapping": 3.0}
    unused = {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": VOCAB}
    unused |= {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "num_kv_shared_layers": 0}
    unused |= {"target_model_type": "gemma4", "target_text_model_type": "gemma4_text", "num_experts": None}
    kind = {"architectures": ["Gemma4DSparkModel"], "rope_theta": None, "hidden_act": None}
    return deepspec(**{**kind, **text, **unused, **changes})


def specforge(**changes: Any) -> Config:
    """SpecForge's format of one: z-lab's, with the heads' keys in `dflash_config`."""
    nested = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **HEADS}
    nested |= changes.pop("dflash", {})
    return z_lab(**{"architectures": ["DSparkDraftModel"], "block_size": 15, **changes}, dflash=nested)


def dspark_speculators(**changes: Any) -> Config:
    """Speculators' format of one, with its defaults but for the rank."""
    kind = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 15}
    return speculators(**{**kind, "sample_from_anchor": True, "markov_rank": 6, **changes})


SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
THREE_TAPS = {**SECOND, "conv_kernel_size": 3, "conv_group_size": 4, "selector_top_k": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
VARIANTS: dict[str, Config] = {
    "z-lab full attention": z_lab(),
    "z-lab causal everywhere": z_lab(is_causal=True),
    "z-lab causal, nested key": z_lab(dflash={"causal": True}),
    "z-lab sliding layers are causal": z_lab(**SLIDING),
    "z-lab sliding but bidirectional": z_lab(**SLIDING, is_causal=False),
    "z-lab swa in all layers": z_lab(dflash={"use_swa": True, "swa_window_size": 6}),
    "z-lab scales and cap": z_lab(
        dflash={"input_embedding_scale": 5.5, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
    ),
    "z-lab rope parameters": z_lab(
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "z-lab partly rotated": z_lab(partial_rotary_factor=0.5),
    "z-lab mask embedding": z_lab(dflash={"mask_token_id": VOCAB + 5}),
    "z-lab ungrouped heads": z_lab(num_key_value_heads=4),
    "z-lab nested block size": z_lab(block_size=None, dflash={"block_size": 16}),
    "z-lab biases": z_lab(attention_bias=True),
    "z-lab interleaved pairs": z_lab(is_neox_style=False),
    "z-lab interleaved pairs, partly rotated": z_lab(is_neox_style=False, partial_rotary_factor=0.5),
    "z-lab sinks and scaled values": z_lab(
        attention_bias=True, dflash={"attention_sink_bias": True, "attention_value_scale": 0.612}
    ),
    "z-lab own vocabulary": z_lab(draft_vocab_size=40),
    "z-lab second": z_lab(architectures=["DFlash2DraftModel"], **SLIDING, is_causal=False, dflash=SECOND),
    "z-lab second, three taps": z_lab(
        dflash={**THREE_TAPS, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
    ),
    "z-lab convolutions alone": z_lab(dflash={"conv_kernel_size": 2, "conv_group_size": 16}),
    "z-lab selector alone": z_lab(dflash={"selector_rank": 6, "selector_top_k": 5}),
    "speculators second": speculators(speculators_model_type="dflash2", layer=SLIDING, **SECOND),
    "assistant": assistant(),
    "z-lab JetSpec's causal head": z_lab(dflash={"causal_head": True}),
    "deepspec dspark": deepspec(),
    "deepspec dflash": deepspec(markov_rank=0, enable_confidence_head=False),
    "deepspec dspark for gemma 4": deepspec_gemma4(),
    "deepspec dspark for gemma 4, own values": deepspec_gemma4(attention_k_eq_v=False),
    "specforge dspark": specforge(is_causal=True),
    "specforge dspark, confidence of hidden states": specforge(dflash={"confidence_head_with_markov": False}),
    "speculators dspark": dspark_speculators(layer=SLIDING, draft_vocab_size=80),
    "speculators dspark, masks alone": dspark_speculators(sample_from_anchor=False, block_size=16),
    "speculators borrowed": speculators(),
    "speculators own vocabulary": speculators(draft_vocab_size=40),
    "speculators sliding": speculators(layer=SLIDING),
    "speculators sliding non-causal": speculators(layer=SLIDING, sliding_window_non_causal=True),
}


EAGLE3_BLOCK = {
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
EAGLE3_VOCAB = 96


def sglang(**changes: Any) -> Config:
    """EAGLE-3 in its original layout; taps as SGLang counts them: outputs of these blocks."""
    top = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": EAGLE3_VOCAB}
    inside = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
    return {**EAGLE3_BLOCK, **top, **inside, **changes}


def eagle3_speculators(*, layer: Config | None = None, **changes: Any) -> Config:
    """The same in Speculators' format: the block is nested, taps are inputs of these blocks."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {**EAGLE3_BLOCK, **(layer or {})},
        "draft_vocab_size": EAGLE3_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "speculators_config": {"algorithm": "eagle3"},
        **changes,
    }


EAGLE3: dict[str, Config] = {
    "sglang": sglang(),
    "sglang whole vocabulary, lent head": sglang(draft_vocab_size=None),
    "sglang vLLM's ids": sglang(eagle_config=None, eagle_aux_hidden_state_layer_ids=[3, 1, 2]),
    "sglang biases": sglang(attention_bias=True),
    "speculators": eagle3_speculators(),
    "speculators of a Qwen3": eagle3_speculators(layer={"model_type": "qwen3"}, norm_before_residual=True),
    "speculators normed before fc": eagle3_speculators(norm_before_fc=True, norm_before_residual=True),
    "speculators narrower": eagle3_speculators(layer={"hidden_size": 32}, target_hidden_size=64),
}


def drafter_tensors(config: Config, seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights of a drafter, scaled so that logits differ but do not explode."""
    raw = config.get("transformer_layer_config", config)
    is_assistant = config.get("architectures") == ["MuseGlimmerAssistantModel"]
    chained, is_gemma4 = is_eagle3(config), "global_head_dim" in raw
    keys = config.get("dflash_config", config)
    draws = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draws) * scale * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=draws)

    hidden, inner, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    heads, dim = raw["num_attention_heads"], head_dim_of(raw)
    of_target = config.get("target_hidden_size") or hidden
    inputs, sizes = hidden * (1 + chained), {"q": heads * dim, "k": kv_heads_of(raw) * dim}
    if not raw.get("attention_k_eq_v"):
        sizes["v"] = sizes["k"]
    tensors = {"encoder.fc.weight" if is_assistant else "fc.weight": matrix(hidden, 3 * of_target)}
    if not chained:
        tensors["encoder.output_norm_enc.weight" if is_assistant else "hidden_norm.weight"] = norm(hidden)
    tensors["norm.weight"] = norm(hidden)
    norms = ["input_layernorm", "post_attention_layernorm", *["hidden_norm"] * chained]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * is_gemma4
    for i in range(raw["num_hidden_layers"]):
        at = "midlayer" if chained and config is raw else f"layers.{i}"
        tensors |= {f"{at}.{name}.weight": norm(hidden) for name in norms}
        tensors |= {f"{at}.self_attn.{name}_proj.weight": matrix(n, inputs) for name, n in sizes.items()}
        tensors[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, sizes["q"])
        if not chained or raw["model_type"] == "qwen3":
            tensors |= {f"{at}.self_attn.{name}_norm.weight": norm(dim) for name in "qk"}
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
        if is_gemma4:
            tensors[f"{at}.layer_scalar"] = norm(1)
        if raw.get("attention_bias"):
            biases = {**sizes, "o": hidden}
            tensors |= {f"{at}.self_attn.{name}_proj.bias": 2 * norm(n) - 2 for name, n in biases.items()}
        if keys.get("attention_sink_bias"):
            tensors[f"{at}.self_attn.attention_sink_bias"] = norm(heads) * 2
        if (taps := keys.get("conv_kernel_size")) is not None:
            for name in ("attention_conv", "mlp_conv"):
                columns = 2 * taps * hidden // keys["conv_group_size"]
                tensors[f"{at}.{name}.base_kernel"] = matrix(2 * taps, hidden, 3.0).view(2, taps, hidden)
                tensors[f"{at}.{name}.kernel_projection.weight"] = matrix(columns, hidden, 0.5)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * of_target)
    if (rank := keys.get("selector_rank")) is not None:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = matrix(vocab, rank, rank**0.5)
        tensors["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden)
    draft_vocab = config.get("draft_vocab_size", None if chained else vocab) or vocab
    rank, of_format = keys.get("markov_rank", 0), config.get("speculators_model_type") == "dspark"
    if rank:  # rows are long enough to change the path
        tensors["markov_head.markov_w1.weight"] = matrix(vocab, rank, rank**0.5)
        tensors["markov_head.markov_w2.weight"] = matrix(draft_vocab, rank, rank**0.5)
    if keys.get("enable_confidence_head", of_format):
        width = hidden + (rank if keys.get("confidence_head_with_markov", of_format) else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, width, 2.0)
        tensors["confidence_head.proj.bias"] = torch.tensor([0.3])
    has_vocabulary = draft_vocab != vocab
    if hidden != of_target or (has_vocabulary and not chained):
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    if has_vocabulary:
        chosen = torch.randperm(vocab, generator=draws)[:draft_vocab].sort().values
        tensors["lm_head.weight"] = matrix(draft_vocab, hidden, 3.0 if chained else 1.0)
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(vocab), chosen)
    return tensors


def is_eagle3(config: Config) -> bool:
    return (config.get("architectures") or [""])[0] in ("LlamaForCausalLMEagle3", "Eagle3Speculator")


def head_dim_of(raw: Config) -> int:
    return raw.get("global_head_dim", raw["head_dim"])


def kv_heads_of(raw: Config) -> int:
    return raw["num_global_key_value_heads" if raw.get("attention_k_eq_v") else "num_key_value_heads"]


def write_drafter(
    folder: Path,
    config: Config,
    tensors: dict[str, torch.Tensor] | None = None,
    mask_embedding: torch.Tensor | None = None,
) -> Path:
    """Write a checkpoint folder of any kind; its weights are random unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    if mask_embedding is not None:
        torch.save(mask_embedding, folder / "mask_embedding.pt")
    return folder
