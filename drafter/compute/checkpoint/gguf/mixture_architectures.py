"""gpt-oss, glm4moe, minimax-m2 and deepseek2: experts with biases, sinks, sigmoid routers, latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gguf.constants import ExpertGatingFuncType, GGMLQuantizationType
from torch import Tensor

from .architecture import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    LAYER,
    MLP_EXPERTS,
    PLAIN,
    Architecture,
    Config,
    Part,
    Views,
    attention_config,
    expert_parts,
    has_part,
    nothing,
    num_experts_of,
    num_mtp_layers,
    partner,
    require_dimensions,
)
from .gguf_file import GgufFile
from .header import TensorInfo
from .metadata_keys import MetadataKeys
from .rope_keys import rope_config
from .tensor_views import ComputedTensor, values

_BLOCK_BYTES = 17  # of MXFP4: an exponent and 32 codes
_EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def _gpt_oss(keys: MetadataKeys) -> Config:
    attention = attention_config(keys)
    rope = rope_config(keys, attention["head_dim"])
    return {
        **attention,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "num_local_experts": num_experts_of(keys),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": keys.count("attention.sliding_window"),
        "attention_bias": has_part(keys.file, "attn_q.bias"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _gate_up(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return a view of all experts' gate and up rows, interleaved, as gpt-oss's checkpoint has them.

    GGUF has gate and up in tensors of their own. `name`: the checkpoint's, if it is not quantized.
    """
    up = partner(keys, info, "ffn_gate_exps", "ffn_up_exps").name
    if info.name.endswith(".bias"):
        require_dimensions(keys, info, 2)
        experts, inner = info.shape
        bias = ComputedTensor((experts, 2 * inner), lambda file: _interleaved(file, info.name, up))
        return {f"{name.removesuffix('.bias')}_bias": bias}
    require_dimensions(keys, info, 3)
    name, (experts, inner, hidden) = name.removesuffix(".weight"), info.shape
    if not _are_packed(keys):
        shape = (experts, hidden, 2 * inner)
        return {name: ComputedTensor(shape, lambda file: _interleaved(file, info.name, up).transpose(1, 2))}
    return _packed(name, (experts, 2 * inner, hidden), info.name, up)


def _down(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    if info.name.endswith(".bias"):
        return {
            f"{name.removesuffix('.bias')}_bias": ComputedTensor(
                info.shape, lambda file: values(file, info.name)
            )
        }
    require_dimensions(keys, info, 3)
    name, (experts, hidden, inner) = name.removesuffix(".weight"), info.shape
    if not _are_packed(keys):
        shape = (experts, inner, hidden)
        return {name: ComputedTensor(shape, lambda file: values(file, info.name).transpose(1, 2))}
    return _packed(name, info.shape, info.name)


def _are_packed(keys: MetadataKeys) -> bool:
    """Return whether all experts of all layers have MXFP4, in which this model is published."""
    names = tuple(f".{name}.weight" for name in _EXPERT_TENSORS)
    types = {each.type for each in keys.file.tensors.values() if each.name.endswith(names)}
    return types == {GGMLQuantizationType.MXFP4}


def _packed(name: str, shape: tuple[int, ...], *stored: str) -> Views:
    experts, rows, inputs = shape
    blocks = (experts, rows, inputs // 32)
    return {
        f"{name}_blocks": ComputedTensor(
            (*blocks, 16), lambda file: _pairs(_blocks(file, *stored)[..., 1:]), "U8"
        ),
        f"{name}_scales": ComputedTensor(blocks, lambda file: _blocks(file, *stored)[..., 0], "U8"),
    }


def _blocks(file: GgufFile, *names: str) -> Tensor:
    """Return the blocks of one tensor, or of two whose rows are interleaved, uint8 [E, O, B, X]."""
    found = [
        torch.tensor(file.blocks(name)).view(*file.tensors[name].shape[:2], -1, _BLOCK_BYTES)
        for name in names
    ]
    return found[0] if len(found) == 1 else torch.stack(found, dim=2).flatten(1, 2)


def _pairs(bytes_: Tensor) -> Tensor:
    """Return bytes of inputs 2 j and 2 j + 1; those of GGUF hold the inputs j and j + 16."""
    codes = torch.cat((bytes_ & 0xF, bytes_ >> 4), dim=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _interleaved(file: GgufFile, *names: str) -> Tensor:
    return torch.stack([values(file, name) for name in names], dim=2).flatten(1, 2)


def _sigmoid_experts(keys: MetadataKeys) -> Config:
    """Return the keys of DeepSeek-V3's experts, which GLM-4.5 shares."""
    function = keys.integer("expert_gating_func", 0)
    if function != ExpertGatingFuncType.SIGMOID:
        raise keys.wrong("expert_gating_func", function, "2, a sigmoid: others are not supported")
    return {
        "n_routed_experts": num_experts_of(keys),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "num_nextn_predict_layers": num_mtp_layers(keys),
    }


def _glm4_moe(keys: MetadataKeys) -> Config:
    attention = attention_config(keys)
    return {
        **attention,
        **_sigmoid_experts(keys),
        "attention_bias": has_part(keys.file, "attn_q.bias"),
        "use_qk_norm": has_part(keys.file, "attn_q_norm.weight"),
        "rope_parameters": rope_config(keys, attention["head_dim"]),
    }


def _minimax_m2(keys: MetadataKeys) -> Config:
    attention = attention_config(keys)
    return {
        **attention,
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "num_local_experts": num_experts_of(keys),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "rope_parameters": rope_config(keys, attention["head_dim"]),
    }


def _deepseek2(keys: MetadataKeys) -> Config:
    rotated, heads = keys.count("rope.dimension_count"), keys.count("attention.head_count")
    size, of_values = (
        keys.count(f"attention.{name}_mla" if keys.has(f"attention.{name}_mla") else f"attention.{name}")
        for name in ("key_length", "value_length")  # older files have no others
    )
    return {
        **_sigmoid_experts(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": keys.count("feed_forward_length"),
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": of_values,
        "rope_parameters": _with_score_scale(keys, rope_config(keys, rotated)),
    }


def _with_score_scale(keys: MetadataKeys, rope: Config) -> Config:
    """Return rotary settings with YaRN's factor of scores; that of cosines and sines is 1 in GGUF."""
    key = "rope.scaling.yarn_log_multiplier"
    if rope["rope_type"] != "yarn" or not keys.has(key):
        return rope
    factor = round(10 * keys.number(key), 6)  # the file holds a tenth of it
    return {**rope, "mscale": factor, "mscale_all_dim": factor}


def _kv_up(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return each head's rows of keys, then of values; the file has those of keys transposed."""
    of_values = partner(keys, info, "attn_k_b", "attn_v_b")
    require_dimensions(keys, info, 3)
    heads, rank, size = info.shape

    def compute(file: GgufFile) -> Tensor:
        keys_HNC = values(file, info.name).transpose(1, 2)
        return torch.cat((keys_HNC, values(file, of_values.name)), dim=1).flatten(0, 1)

    return {name: ComputedTensor((heads * (size + of_values.shape[1]), rank), compute)}


_CORRECTION = "e_score_correction_bias"
_SHARED: Mapping[str, Part] = {
    "ffn_gate_inp": Part("mlp.gate"),
    "exp_probs_b.bias": Part(f"mlp.gate.{_CORRECTION}"),
    **MLP_EXPERTS,
    **{f"ffn_{name}_shexp": Part(f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")},
}
_NEXTN = ("eh_proj", "enorm", "hnorm", "embed_tokens")
_GLM4_MTP: Mapping[str, Part] = {
    **{f"nextn.{name}": Part(f"{LAYER}{name}") for name in _NEXTN},
    "nextn.shared_head_norm": Part(f"{LAYER}shared_head.norm"),
    "nextn.shared_head_head": Part(f"{LAYER}shared_head.head"),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        _gpt_oss,
        {
            **ATTENTION,
            "attn_sinks.weight": Part("self_attn.sinks"),
            "post_attention_norm": Part("post_attention_layernorm"),
            "ffn_gate_inp": Part("mlp.router"),
            "ffn_gate_exps": Part("mlp.experts.gate_up_proj", _gate_up),
            "ffn_up_exps": Part(rule=nothing),
            "ffn_down_exps": Part("mlp.experts.down_proj", _down),
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        _glm4_moe,
        {
            **ATTENTION,
            **HEAD_NORMS,
            "post_attention_norm": Part("post_attention_layernorm"),
            **DENSE,
            **_SHARED,
        },
        mtp=(LAYER, _GLM4_MTP),
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        _minimax_m2,
        {
            **ATTENTION,
            **HEAD_NORMS,
            "ffn_norm": Part("post_attention_layernorm"),
            "ffn_gate_inp": Part("block_sparse_moe.gate"),
            "exp_probs_b.bias": Part(f"block_sparse_moe.{_CORRECTION}"),
            **expert_parts(*(f"block_sparse_moe.experts.{{expert}}.w{i}" for i in (1, 3, 2))),
        },
    ),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _deepseek2,
        {
            **PLAIN,
            **_SHARED,
            "attn_q_a": Part("self_attn.q_a_proj"),
            "attn_q_a_norm": Part("self_attn.q_a_layernorm"),
            "attn_q_b": Part("self_attn.q_b_proj"),
            "attn_kv_a_mqa": Part("self_attn.kv_a_proj_with_mqa"),
            "attn_kv_a_norm": Part("self_attn.kv_a_layernorm"),
            "attn_kv_b": Part("self_attn.kv_b_proj"),
            "attn_k_b": Part("self_attn.kv_b_proj", _kv_up),
            "attn_v_b": Part(rule=nothing),
        },
    ),
}
