"""Drafters as GGUF files in the layout of llama.cpp's converter, written without Manta's writer.

Names and rules are those of llama.cpp: `conversion/qwen.py` for DFlash, DFlash2 and DSpark, and
`conversion/llama.py` for EAGLE-3, where q and k are permuted and `d2t` becomes ids of the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from support.checkpoints.drafters import drafter_tensors, head_dim_of, is_eagle3
from support.checkpoints.gguf_checkpoints import show

Config = dict[str, Any]  # Any: JSON

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "hidden_norm": "attn_norm_2",
}
_LAYER_WHOLE = {
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
}
_OTHERS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
_IN_FP32 = ("attn_conv_base", "ffn_conv_base")


def publish_drafter(
    config: Config,
    file: Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    type: str = "F32",
    changes: Mapping[str, Any] | None = None,
    further: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a drafter and return the folder that shows the file.

    Args:
        config: in z-lab's, SpecForge's, SGLang's or Speculators' format.
        type: GGUF's type of matrices.
        changes: keys of the metadata with other values; None leaves one out.
        further: tensors by llama.cpp's names.
    """
    found = dict(drafter_tensors(config) if tensors is None else tensors)
    writer = GGUFWriter(file, "eagle3" if is_eagle3(config) else "dflash")
    metadata = {key.replace("{}", writer.arch): value for key, value in _metadata(config, found).items()}
    for key, value in (metadata | dict(changes or {})).items():
        _add(writer, key, value)
    kind = GGMLQuantizationType[type]
    for name, tensor in found.items():
        if name != "t2d":
            _add_tensor(writer, config, name, tensor, kind)
    for name, tensor in (further or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return show(file, file.with_suffix(""))


def _metadata(config: Config, tensors: Mapping[str, Tensor]) -> Config:
    raw = config.get("transformer_layer_config", config)
    nested, dim = config.get("dflash_config", config), head_dim_of(raw)
    found: Config = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(raw["vocab_size"])],
        "{}.block_count": raw["num_hidden_layers"],
        "{}.context_length": raw["max_position_embeddings"],
        "{}.embedding_length": raw["hidden_size"],
        "{}.feed_forward_length": raw["intermediate_size"],
        "{}.attention.head_count": raw["num_attention_heads"],
        "{}.attention.head_count_kv": raw["num_key_value_heads"],
        "{}.attention.key_length": dim,
        "{}.attention.value_length": dim,
        "{}.attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        "{}.rope.freq_base": float(raw["rope_theta"]),
    }
    if is_eagle3(config):
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids", [])
        return found | {
            "{}.vocab_size": raw["vocab_size"],
            "{}.rope.dimension_count": dim,
            "{}.target_layers": config.get("eagle_aux_hidden_state_layer_ids") or [i + 1 for i in nested],
            "{}.target_hidden_size": config.get("target_hidden_size") or raw["hidden_size"],
            "{}.norm_before_residual": config.get("norm_before_residual", False),
            "{}.norm_before_fc": config.get("norm_before_fc", False),
        }
    ids = nested.get("target_layer_ids") or [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    found |= {
        "tokenizer.ggml.mask_token_id": nested["mask_token_id"],
        "{}.block_size": config["block_size"],
        "{}.target_layers": [i + 1 for i in ids],
    }
    for key, name in (
        ("conv_kernel_size", "conv_kernel_size"),
        ("conv_group_size", "conv_group_size"),
        ("selector_rank", "selector_rank"),
        ("selector_top_k", "selector_top_k"),
        ("output_multiplier", "logit_scale"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("input_embedding_scale", "embedding_scale"),
        ("attention_value_scale", "attention.value_scale"),
    ):
        if nested.get(key) is not None:
            found[f"{{}}.{name}"] = nested[key]
    if (share := raw.get("partial_rotary_factor")) is not None:
        found["{}.rope.dimension_count"] = int(dim * share)
    if "sliding_window" in raw and raw.get("use_sliding_window", True):
        found["{}.attention.sliding_window"] = raw["sliding_window"]
        found["{}.attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in raw["layer_types"]
        ]
    if (causal := config.get("is_causal")) is not None:
        found["{}.attention.causal"] = causal
    if any(name.startswith("markov_head") for name in tensors):
        found["{}.sample_from_anchor"] = config.get("sample_from_anchor", True)
        found["{}.has_confidence_head"] = "confidence_head.proj.weight" in tensors
    return found


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            assert isinstance(value, Sequence)
            writer.add_array(key, value)


def _add_tensor(
    writer: GGUFWriter, config: Config, name: str, tensor: Tensor, kind: GGMLQuantizationType
) -> None:
    if name == "d2t":
        ids = (tensor.long() + torch.arange(len(tensor))).numpy()
        writer.add_tensor("d2t", ids, raw_dtype=GGMLQuantizationType.I64)
        return
    raw = config.get("transformer_layer_config", config)
    if is_eagle3(config) and re.search(r"[qk]_proj\.", name):
        heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    stored = stored_name(name)
    array = np.ascontiguousarray(tensor.float().numpy())
    plain = tensor.dim() == 1 or stored.endswith(_IN_FP32) or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
    if plain:
        kind = GGMLQuantizationType.F32
    writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)


def stored_name(name: str) -> str:
    """Return llama.cpp's name of a drafter's tensor."""
    if name in _OTHERS:
        return _OTHERS[name]
    layer, part = re.fullmatch(r"(?:layers\.(\d+)|midlayer)\.(.+)", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if part in _LAYER_WHOLE:
        return f"blk.{layer or 0}.{_LAYER_WHOLE[part]}"
    module, _, suffix = part.rpartition(".")
    return f"blk.{layer or 0}.{_LAYER[module]}.{suffix}"
