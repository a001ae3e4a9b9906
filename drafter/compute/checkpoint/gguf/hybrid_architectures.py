"""gemma4, qwen35 and qwen35moe: layers of two kinds, with different heads or with recurrent states.

Qwen's converter orders the heads of values in a delta net by their number within a key head's group first,
where the published order is by key head first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .architecture import (
    ATTENTION,
    DENSE,
    FREQUENCIES,
    HEAD_NORMS,
    MLP_EXPERTS,
    Architecture,
    Config,
    Part,
    Rule,
    Views,
    as_row,
    attention_config,
    experts,
    experts_gate_up,
    layers_with,
    nothing,
    num_experts_of,
    num_layers_of,
    num_mtp_layers,
    one_less,
    require_dimensions,
)
from .gguf_file import GgufFile
from .header import TensorInfo
from .metadata_keys import MetadataKeys
from .rope_keys import rope_config
from .tensor_views import ComputedTensor, StoredRows, values

_UNROTATED = 1e20  # factors of frequencies above it are of dimensions that are not rotated
_GEMMA_LOCAL_THETA, _GEMMA_THETA = 1e4, 1e6


def _gemma4(keys: MetadataKeys) -> Config:
    num_layers = num_layers_of(keys)
    slides = keys.flags("attention.sliding_window_pattern", num_layers)
    if slides is None or all(slides) or not any(slides):
        wanted = "true for layers that slide and false for others, of both kinds"
        raise keys.wrong("attention.sliding_window_pattern", slides, wanted)
    kv_heads = keys.counts("attention.head_count_kv", num_layers)
    without_v = set(range(num_layers)) - set(layers_with(keys.file, "attn_v.weight", num_layers))
    num_experts = num_experts_of(keys) if keys.integer("expert_count", 0) else 0
    return {
        "num_attention_heads": keys.count("attention.head_count"),
        "num_key_value_heads": kv_heads[slides.index(True)],
        "num_global_key_value_heads": kv_heads[slides.index(False)],
        "head_dim": keys.count("attention.key_length_swa"),
        "global_head_dim": keys.count("attention.key_length"),
        "attention_k_eq_v": bool(without_v),
        "intermediate_size": keys.count("feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {
            "full_attention": _proportional(keys),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            },
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0),
        "enable_moe_block": num_experts > 0,
        **(
            {
                "num_experts": num_experts,
                "top_k_experts": keys.count("expert_used_count"),
                "moe_intermediate_size": keys.count("expert_feed_forward_length"),
            }
            if num_experts
            else {}
        ),
    }


def _proportional(keys: MetadataKeys) -> Config:
    theta = keys.number("rope.freq_base", _GEMMA_THETA)
    if FREQUENCIES not in keys.file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = values(keys.file, FREQUENCIES)
    rotated = factors[factors < _UNROTATED]
    if not len(rotated) or not bool((rotated == 1).all()):
        raise keys.wrong("rope.dimension_count", factors.tolist(), "rotated by factors of 1 and none others")
    share = len(rotated) / len(factors)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _qwen35(keys: MetadataKeys) -> Config:
    num_layers, attention = num_layers_of(keys), attention_config(keys)
    value_heads = keys.count("ssm.time_step_rank")
    recurrent = set(layers_with(keys.file, "ssm_conv1d.weight", num_layers))
    return {
        **attention,
        "layer_types": [
            "linear_attention" if layer in recurrent else "full_attention" for layer in range(num_layers)
        ],
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "mtp_num_hidden_layers": num_mtp_layers(keys),
        "rope_parameters": rope_config(keys, attention["head_dim"]),
    }


def _qwen35_moe(keys: MetadataKeys) -> Config:
    return {
        **_qwen35(keys),
        "num_experts": num_experts_of(keys),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
    }


def _published_order(keys: MetadataKeys, num_rows: int, num_first: int = 0) -> Tensor:
    """Return the file's row of each published one; `num_first` rows before those of values stay."""
    groups = keys.count("ssm.group_count")
    per_group = keys.count("ssm.time_step_rank") // groups
    order = torch.arange(num_rows - num_first).view(per_group, groups, -1).transpose(0, 1).flatten()
    return torch.cat((torch.arange(num_first), num_first + order))


def _of_keys(keys: MetadataKeys) -> int:
    """Return the rows of queries and keys before those of values."""
    return 2 * keys.count("ssm.group_count") * keys.count("ssm.state_size")


def _value_rows(has_keys: bool = False) -> Rule:
    def rule(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
        first = _of_keys(keys) if has_keys else 0
        return {name: StoredRows(info, order=lambda rows: _published_order(keys, rows, first))}

    return rule


def _value_columns(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return a matrix with the columns of values reordered, in numbers where their order differs."""
    if keys.count("ssm.group_count") == keys.count("ssm.time_step_rank"):
        return {name: StoredRows(info)}
    require_dimensions(keys, info, 2)

    def compute(file: GgufFile) -> Tensor:
        return values(file, info.name)[:, _published_order(keys, info.shape[1])]

    return {name: ComputedTensor(info.shape, compute)}


def _computed_values(change: Callable[[Tensor], Tensor], *, is_kernel: bool = False) -> Rule:
    """Return a rule for a tensor with a row per value head, or a kernel's channels, whose form changes."""

    def rule(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
        require_dimensions(keys, info, 2 if is_kernel else 1)

        def compute(file: GgufFile) -> Tensor:
            order = _published_order(keys, info.shape[0], _of_keys(keys) if is_kernel else 0)
            return change(values(file, info.name)[order])

        return {
            name: ComputedTensor((*info.shape[:1], 1, *info.shape[1:]) if is_kernel else info.shape, compute)
        }

    return rule


def _log_of_negative(rates: Tensor) -> Tensor:
    return (-rates).log()


def _with_a_channel(kernel_CT: Tensor) -> Tensor:
    return kernel_CT.unsqueeze(1)


_GEMMA4_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_LAYER: Mapping[str, Part] = {
    **ATTENTION,
    **HEAD_NORMS,
    **DENSE,
    **{name: Part(theirs) for name, theirs in _GEMMA4_NORMS.items()},
    "layer_output_scale.weight": Part("layer_scalar"),
    "ffn_gate_inp": Part("router.proj"),
    "ffn_gate_inp.scale": Part("router.scale"),
    "ffn_down_exps.scale": Part("router.per_expert_scale"),
    "ffn_gate_up_exps": Part("experts.{expert}.{kind}_proj", experts_gate_up),
    "ffn_down_exps": Part("experts.{expert}.down_proj", experts),
}
_DELTA = "linear_attn."
_QWEN35_LAYER: Mapping[str, Part] = {
    **ATTENTION,
    "attn_norm": Part("input_layernorm", one_less),
    "attn_q_norm": Part("self_attn.q_norm", one_less),
    "attn_k_norm": Part("self_attn.k_norm", one_less),
    "post_attention_norm": Part("post_attention_layernorm", one_less),
    "attn_qkv": Part(f"{_DELTA}in_proj_qkv", _value_rows(has_keys=True)),
    "attn_gate": Part(f"{_DELTA}in_proj_z", _value_rows()),
    "ssm_alpha": Part(f"{_DELTA}in_proj_a", _value_rows()),
    "ssm_beta": Part(f"{_DELTA}in_proj_b", _value_rows()),
    "ssm_a": Part(f"{_DELTA}A_log", _computed_values(_log_of_negative)),
    "ssm_dt.bias": Part(f"{_DELTA}dt_bias", _value_rows()),
    "ssm_conv1d": Part(f"{_DELTA}conv1d", _computed_values(_with_a_channel, is_kernel=True)),
    "ssm_norm": Part(f"{_DELTA}norm"),
    "ssm_out": Part(f"{_DELTA}out_proj", _value_columns),
    **DENSE,
}
_QWEN35_MOE_LAYER: Mapping[str, Part] = {
    **_QWEN35_LAYER,
    "ffn_gate_inp": Part("mlp.gate"),
    **MLP_EXPERTS,
    **{f"ffn_{name}_shexp": Part(f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": Part("mlp.shared_expert_gate", as_row),
}
_QWEN35_OTHERS: Mapping[str, Part] = {"output_norm.weight": Part("model.norm.weight", one_less)}
_QWEN35_MTP: tuple[str, Mapping[str, Part]] = (
    "mtp.layers.0.",
    {
        "nextn.eh_proj": Part("mtp.fc"),
        "nextn.enorm": Part("mtp.pre_fc_norm_embedding", one_less),
        "nextn.hnorm": Part("mtp.pre_fc_norm_hidden", one_less),
        "nextn.shared_head_norm": Part("mtp.norm", one_less),
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "gemma4_text", _gemma4, _GEMMA4_LAYER, {FREQUENCIES: Part(rule=nothing)}
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35, _QWEN35_LAYER, _QWEN35_OTHERS, _QWEN35_MTP
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _qwen35_moe,
        _QWEN35_MOE_LAYER,
        _QWEN35_OTHERS,
        _QWEN35_MTP,
    ),
}
