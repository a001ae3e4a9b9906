"""Random drafter checkpoints on disk, in both formats and all variants, for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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


def z_lab(**changes) -> dict:
    """A raw config; keys of `dflash_config` go into `dflash`."""
    nested = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], **changes.pop("dflash", {})}
    top = {"architectures": ["DFlashDraftModel"], "num_target_layers": TARGET_LAYERS, "block_size": 16}
    return {**BACKBONE, **top, **changes, "dflash_config": nested}


def speculators(*, layer: dict | None = None, **changes) -> dict:
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


def assistant(**changes) -> dict:
    """transformers' own format: z-lab's keys at the top, all sliding layers bidirectional."""
    top = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    keys = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], "block_size": 16}
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    return {**BACKBONE, **sliding, **top, **keys, **changes}


HEADS = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}


def deepspec(**changes) -> dict:
    """DeepSpec's format of a DSpark drafter: all keys at the top; the anchor's row predicts, too."""
    kind = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": TARGET_LAYERS, "block_size": 15}
    keys = {"mask_token_id": 90, "target_layer_ids": [1, 3, 4], "num_anchors": 512}
    return {**BACKBONE, **kind, **keys, **HEADS, "markov_head_type": "vanilla", **changes}


def deepspec_gemma4(**changes) -> dict:
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


def specforge(**changes) -> dict:
    """SpecForge's format of one: z-lab's, with the heads' keys in `dflash_config`."""
    nested = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **HEADS}
    nested |= changes.pop("dflash", {})
    return z_lab(**{"architectures": ["DSparkDraftModel"], "block_size": 15, **changes}, dflash=nested)


def dspark_speculators(**changes) -> dict:
    """Speculators' format of one, with its defaults but for the rank."""
    kind = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 15}
    return speculators(**{**kind, "sample_from_anchor": True, "markov_rank": 6, **changes})


SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
THREE_TAPS = {**SECOND, "conv_kernel_size": 3, "conv_group_size": 4, "selector_top_k": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
VARIANTS: dict[str, dict] = {
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


def random_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a drafter, scaled so that logits differ but do not explode."""
    raw = config.get("transformer_layer_config", config)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], head_dim_of(raw)
    heads, kv_heads = raw["num_attention_heads"], kv_heads_of(raw)
    is_assistant = config.get("architectures") == ["MuseGlimmerAssistantModel"]
    tensors = {
        "encoder.fc.weight" if is_assistant else "fc.weight": matrix(hidden, 3 * hidden),
        "encoder.output_norm_enc.weight" if is_assistant else "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(raw["num_hidden_layers"]):
        at = f"layers.{i}"
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        if raw.get("attention_k_eq_v"):
            del sizes["v"]
        for name, count in sizes.items():
            tensors[f"{at}.self_attn.{name}_proj.weight"] = matrix(count * dim, hidden)
        tensors[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        tensors[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = norm(hidden)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{name}.weight"] = norm(dim)
        if "global_head_dim" in raw:
            for name in ("pre", "post"):
                tensors[f"{at}.{name}_feedforward_layernorm.weight"] = norm(hidden)
            tensors[f"{at}.layer_scalar"] = norm(1)
    keys = config.get("dflash_config", config)
    for i in range(raw["num_hidden_layers"]):
        at = f"layers.{i}"
        if raw.get("attention_bias"):
            rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "o": hidden}
            tensors |= {f"{at}.self_attn.{n}_proj.bias": norm(size) - 1 for n, size in rows.items()}
        if keys.get("attention_sink_bias"):
            tensors[f"{at}.self_attn.attention_sink_bias"] = norm(heads) * 2
        if (taps := keys.get("conv_kernel_size")) is not None:
            for name in ("attention_conv", "mlp_conv"):
                columns = 2 * taps * hidden // keys["conv_group_size"]
                tensors[f"{at}.{name}.base_kernel"] = matrix(2 * taps, hidden).view(2, taps, hidden) * 3
                tensors[f"{at}.{name}.kernel_projection.weight"] = matrix(columns, hidden) * 0.5
    if (rank := keys.get("selector_rank")) is not None:
        at = "candidate_selector"
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"{at}.{name}"] = matrix(raw["vocab_size"], rank) * rank**0.5
        tensors[f"{at}.hidden_projection.weight"] = matrix(rank, hidden)
    tensors |= _dspark_heads(config, keys, matrix)
    if config.get("draft_vocab_size", raw["vocab_size"]) != raw["vocab_size"]:
        tensors |= _own_vocabulary(config["draft_vocab_size"], raw["vocab_size"], matrix, generator)
    return tensors


def head_dim_of(raw: dict) -> int:
    return raw.get("global_head_dim", raw["head_dim"])


def kv_heads_of(raw: dict) -> int:
    return raw["num_global_key_value_heads" if raw.get("attention_k_eq_v") else "num_key_value_heads"]


def _dspark_heads(config: dict, keys: dict, matrix) -> dict[str, torch.Tensor]:
    is_speculators = config.get("speculators_model_type") == "dspark"
    rank, tensors = keys.get("markov_rank", 0), {}
    if rank:
        scale = rank**0.5  # rows are long enough to change the path
        tensors["markov_head.markov_w1.weight"] = matrix(VOCAB, rank) * scale
        tensors["markov_head.markov_w2.weight"] = matrix(config.get("draft_vocab_size", VOCAB), rank) * scale
    if keys.get("enable_confidence_head", is_speculators):
        width = HIDDEN + (rank if keys.get("confidence_head_with_markov", is_speculators) else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, width) * 2
        tensors["confidence_head.proj.bias"] = torch.tensor([0.3])
    return tensors


def _own_vocabulary(draft: int, vocab: int, matrix, generator) -> dict[str, torch.Tensor]:
    chosen = torch.randperm(vocab, generator=generator)[:draft].sort().values
    return {
        "embed_tokens.weight": matrix(vocab, HIDDEN),
        "lm_head.weight": matrix(draft, HIDDEN),
        "d2t": chosen - torch.arange(draft),
        "t2d": torch.isin(torch.arange(vocab), chosen),
    }


def write(
    folder: Path,
    config: dict,
    tensors: dict[str, torch.Tensor] | None = None,
    mask_embedding: torch.Tensor | None = None,
) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    if mask_embedding is not None:
        torch.save(mask_embedding, folder / "mask_embedding.pt")
    return folder
