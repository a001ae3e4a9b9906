"""dflash and eagle3: drafters. The reader and the writer (`drafter_writer.py`) are made from these tables.

config.json is in z-lab's format (DFlash, DFlash2, DSpark) or in SGLang's (EAGLE-3). Sizes of vocabularies and
heads follow from tensors. llama.cpp names a tap by the block that reads the state, z-lab by the block before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..hf_config import wrong
from .architecture import (
    FREQUENCIES,
    HEAD_NORMS,
    PLAIN,
    Architecture,
    Config,
    Part,
    Views,
    has_part,
    nothing,
    paired_rows,
    rotary_pairs,
)
from .block_formats import FLOATS
from .header import TensorInfo
from .metadata_keys import MetadataKeys
from .rope_keys import rope_config
from .tensor_views import INTEGERS, ComputedTensor, StoredRows, integers, values

MASK_TOKEN, TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
_TOKEN_MAP, _EMBEDDING, _HEAD = "d2t", "token_embd.weight", "output.weight"
_MARKOV, _CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
_PREDECESSOR = "selector_predecessor.weight"
_LAYER = "layers.{layer}."
_FULL, _SLIDING = "full_attention", "sliding_attention"

Value = Any  # Any: a JSON value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how config.json's value is read from the file, and the inverse.

    Attributes:
        type: name of GGUF's type, for a list that of its elements.
    """

    type: str
    read: Callable[[MetadataKeys, str], Value]
    stored: Callable[[Value], Value] = lambda value: value


def _layer_types(keys: MetadataKeys, name: str) -> Value:
    flags = keys.flags(name, keys.count("block_count"))
    return [_SLIDING if slides else _FULL for slides in flags or ()]


COUNT = Kind("UINT32", lambda keys, name: keys.count(name))
NUMBER = Kind("FLOAT32", lambda keys, name: keys.number(name))
FLAG = Kind("BOOL", lambda keys, name: keys.flag(name))
READERS = Kind("INT32", lambda keys, name: keys.integers(name))
TAPS = Kind(
    "INT32",
    lambda keys, name: [each - 1 for each in keys.integers(name)],
    lambda ids: [each + 1 for each in ids],
)
WINDOWS = Kind("BOOL", _layer_types, lambda kinds: [kind == _SLIDING for kind in kinds])


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file and its place in config.json, with dots between levels."""

    name: str
    place: str
    kind: Kind
    is_required: bool = False


_SIZES = (
    Key("block_count", "num_hidden_layers", COUNT, is_required=True),
    Key("context_length", "max_position_embeddings", COUNT),
    Key("embedding_length", "hidden_size", COUNT, is_required=True),
    Key("feed_forward_length", "intermediate_size", COUNT, is_required=True),
    Key("attention.head_count", "num_attention_heads", COUNT, is_required=True),
    Key("attention.head_count_kv", "num_key_value_heads", COUNT),
    Key("attention.key_length", "head_dim", COUNT),
    Key("attention.value_length", "head_dim", COUNT),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", NUMBER, is_required=True),
)
_DFLASH = (
    *_SIZES,
    Key("block_size", "block_size", COUNT, is_required=True),
    Key("target_layers", "dflash_config.target_layer_ids", TAPS, is_required=True),
    Key("attention.causal", "is_causal", FLAG),
    Key("attention.sliding_window", "sliding_window", COUNT),
    Key("attention.sliding_window_pattern", "layer_types", WINDOWS),
    Key("attention.value_scale", "dflash_config.attention_value_scale", NUMBER),
    Key("embedding_scale", "dflash_config.input_embedding_scale", NUMBER),
    Key("logit_scale", "dflash_config.output_multiplier", NUMBER),
    Key("final_logit_softcapping", "dflash_config.final_logit_softcapping", NUMBER),
    Key("conv_kernel_size", "dflash_config.conv_kernel_size", COUNT),
    Key("conv_group_size", "dflash_config.conv_group_size", COUNT),
    Key("selector_rank", "dflash_config.selector_rank", COUNT),
    Key("selector_top_k", "dflash_config.selector_top_k", COUNT),
    Key("sample_from_anchor", "sample_from_anchor", FLAG),
    Key("has_confidence_head", "dflash_config.enable_confidence_head", FLAG),
)
_EAGLE3 = (
    *_SIZES,
    Key("vocab_size", "vocab_size", COUNT),
    Key("target_layers", "eagle_aux_hidden_state_layer_ids", READERS, is_required=True),
    Key("target_hidden_size", "target_hidden_size", COUNT, is_required=True),
    Key("norm_before_residual", "norm_before_residual", FLAG),
    Key("norm_before_fc", "norm_before_fc", FLAG),
)


def _config(keys: MetadataKeys, table: Sequence[Key]) -> Config:
    """Return the keys of config.json that the table names; an optional one may be absent."""
    found: Config = {}
    for key in table:
        if not key.is_required and not keys.has(key.name):
            continue
        level, _, last = key.place.rpartition(".")
        place = found.setdefault(level, {}) if level else found
        value = key.kind.read(keys, key.name)
        if place.setdefault(last, value) != value:
            raise keys.wrong(key.name, value, f"{place[last]}, as the key before it")
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    shape = keys.file.tensors
    return {
        **found,
        "vocab_size": _vocab_size(keys),
        "attention_bias": has_part(keys.file, "attn_q.bias"),
        "rope_parameters": rope_config(keys, found["head_dim"]),
        **({"draft_vocab_size": shape[_TOKEN_MAP].shape[0]} if _TOKEN_MAP in shape else {}),
    }


def _vocab_size(keys: MetadataKeys) -> int:
    tensors, tokens = keys.file.tensors, keys.file.metadata.get(TOKENS)
    for name in (_EMBEDDING, _PREDECESSOR, _MARKOV):
        if name in tensors:
            return tensors[name].shape[0]
    return keys.count("vocab_size", len(tokens)) if isinstance(tokens, list) else keys.count("vocab_size")


def _dflash(keys: MetadataKeys) -> Config:
    _refuse_other_blocks(keys)
    found, tensors = _config(keys, _DFLASH), keys.file.tensors
    if "sliding_window" in found and "layer_types" not in found:
        raise keys.wrong("attention.sliding_window_pattern", None, "given, for attention.sliding_window")
    nested = found["dflash_config"]
    nested["mask_token_id"] = keys.file.metadata.get(MASK_TOKEN)
    if type(nested["mask_token_id"]) is not int:
        remedy = "the id of the mask token; convert the drafter again, with its target"
        raise wrong(keys.where, MASK_TOKEN, nested["mask_token_id"], remedy)
    nested["attention_sink_bias"] = has_part(keys.file, "attn_sinks.weight")
    if _MARKOV not in tensors:
        nested.pop("enable_confidence_head", None)
        is_second = {"conv_kernel_size", "selector_rank"} <= nested.keys()
        return found | {"architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"]}
    nested["markov_rank"] = tensors[_MARKOV].shape[-1]
    nested["enable_confidence_head"] = nested["confidence_head_with_markov"] = _CONFIDENCE in tensors
    return found | {"architectures": ["DSparkDraftModel"]}


def _refuse_other_blocks(keys: MetadataKeys) -> None:
    """Refuse drafters whose blocks are not Qwen3's."""
    if (streams := keys.integer("hyper_connection.count", 0)) > 0:
        wanted = "0 or absent: drafters with the blocks of DeepSeek-V4 are not supported"
        raise keys.wrong("hyper_connection.count", streams, wanted)
    if (activation := keys.text("hidden_activation", "silu")) != "silu":
        wanted = "silu or absent: drafters with the blocks of Gemma 4 are read from safetensors alone"
        raise keys.wrong("hidden_activation", activation, wanted)
    if (scale := keys.number("attention.scale", 0)) != 0:
        raise keys.wrong("attention.scale", scale, "0 or absent: not supported")


def _eagle3(keys: MetadataKeys) -> Config:
    return _config(keys, _EAGLE3)


def _as_numbers(_: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return a tensor that is read as numbers: a packed one is dequantized."""
    if info.type in FLOATS:
        return {name: StoredRows(info)}
    return {name: ComputedTensor(info.shape, lambda file: values(file, info.name))}


def _tied(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return the embedding, which is the head, too, if the file has no other one."""
    head = {} if _HEAD in keys.file.tensors else {"lm_head.weight": StoredRows(info)}
    return {name: StoredRows(info), **head}


def _differences(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return the differences of target ids and draft ids, of which the file has the former."""
    if info.type not in INTEGERS:
        raise wrong(keys.where, info.name, info.type.name, "stored as integers, I64 or I32")
    return {
        name: ComputedTensor(
            info.shape, lambda file: integers(file, info.name).long() - torch.arange(info.shape[0]), "I64"
        )
    }


def _target_ids(d2t_V: Tensor, _: Config) -> Tensor:
    return d2t_V.long() + torch.arange(len(d2t_V))


def _in_fp32(tensor: Tensor, _: Config) -> Tensor:
    return tensor.float()


def _in_pairs(heads: str) -> Callable[[Tensor, Config], Tensor]:
    return lambda rows, config: paired_rows(rows, config[heads])


_OTHERS: Mapping[str, Part] = {
    FREQUENCIES: Part(rule=nothing),
    "fc.weight": Part("fc.weight"),
    "output_norm.weight": Part("norm.weight"),
    _TOKEN_MAP: Part("d2t", _differences, _target_ids),
    _HEAD: Part("lm_head.weight"),
}
_DFLASH_LAYER: Mapping[str, Part] = {
    **PLAIN,
    **HEAD_NORMS,
    "attn_sinks.weight": Part("self_attn.attention_sink_bias", _as_numbers),
    "attn_conv_base": Part("attention_conv.base_kernel", _as_numbers, _in_fp32),
    "attn_conv_proj": Part("attention_conv.kernel_projection"),
    "ffn_conv_base": Part("mlp_conv.base_kernel", _as_numbers, _in_fp32),
    "ffn_conv_proj": Part("mlp_conv.kernel_projection"),
}
_DFLASH_OTHERS: Mapping[str, Part] = {
    **_OTHERS,
    _EMBEDDING: Part("embed_tokens.weight", _tied),
    "enc.output_norm.weight": Part("hidden_norm.weight"),
    _PREDECESSOR: Part("candidate_selector.predecessor_codebook", _as_numbers),
    "selector_successor.weight": Part("candidate_selector.successor_codebook", _as_numbers),
    "selector_hidden.weight": Part("candidate_selector.hidden_projection.weight"),
    _MARKOV: Part("markov_head.markov_w1.weight"),
    "markov_w2.weight": Part("markov_head.markov_w2.weight"),
    _CONFIDENCE: Part("confidence_head.proj.weight"),
    "conf_proj.bias": Part("confidence_head.proj.bias"),
}
_EAGLE3_LAYER: Mapping[str, Part] = {
    **PLAIN,
    "attn_norm_2": Part("hidden_norm"),
    "attn_q": Part(
        "self_attn.q_proj", rotary_pairs("attention.head_count"), _in_pairs("num_attention_heads")
    ),
    "attn_k": Part(
        "self_attn.k_proj", rotary_pairs("attention.head_count_kv"), _in_pairs("num_key_value_heads")
    ),
}
_EAGLE3_OTHERS: Mapping[str, Part] = {
    **_OTHERS,
    _EMBEDDING: Part("embed_tokens.weight"),
    "enc.output_norm.weight": Part("input_norm.weight"),
}

KEYS: Mapping[str, Sequence[Key]] = {"dflash": _DFLASH, "eagle3": _EAGLE3}
ARCHITECTURES: Mapping[str, Architecture] = {
    "dflash": Architecture(
        "DFlashDraftModel", "qwen3", _dflash, _DFLASH_LAYER, _DFLASH_OTHERS, (_LAYER, {}), _LAYER
    ),
    "eagle3": Architecture(
        "LlamaForCausalLMEagle3", "llama", _eagle3, _EAGLE3_LAYER, _EAGLE3_OTHERS, (_LAYER, {}), _LAYER
    ),
}
