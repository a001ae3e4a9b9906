"""llama, qwen2, qwen3, qwen3moe and gemma3: plain blocks, with a softmax over experts or sandwich norms."""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import (
    ATTENTION,
    DENSE,
    FREQUENCIES,
    HEAD_NORMS,
    MLP_EXPERTS,
    PLAIN,
    Architecture,
    Config,
    Part,
    attention_config,
    has_part,
    nothing,
    num_experts_of,
    num_layers_of,
    one_less,
    rotary_pairs,
)
from .metadata_keys import MetadataKeys
from .rope_keys import rope_config

_GEMMA_27B_LAYERS = 62  # this one alone scales scores by the hidden size per head
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA, _GEMMA_THETA = 6, 1e4, 1e6


def _plain(keys: MetadataKeys) -> Config:
    attention = attention_config(keys)
    return {**attention, "rope_parameters": rope_config(keys, attention["head_dim"])}


def _llama(keys: MetadataKeys) -> Config:
    if (num_experts := keys.integer("expert_count", 0)) > 0:
        raise keys.wrong("expert_count", num_experts, "0 or absent: Mixtral is not supported")
    if (window := keys.integer("attention.sliding_window", 0)) > 0:
        wanted = "absent: llama.cpp does not apply it to this architecture"
        raise keys.wrong("attention.sliding_window", window, wanted)
    bias = {
        "attention_bias": has_part(keys.file, "attn_q.bias"),
        "mlp_bias": has_part(keys.file, "ffn_up.bias"),
    }
    return {**_plain(keys), **bias}


def _qwen3(keys: MetadataKeys) -> Config:
    return {**_plain(keys), "attention_bias": has_part(keys.file, "attn_q.bias")}


def _qwen3_moe(keys: MetadataKeys) -> Config:
    return {
        **_qwen3(keys),
        "num_experts": num_experts_of(keys),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(keys: MetadataKeys) -> Config:
    num_layers, attention = num_layers_of(keys), attention_config(keys)
    size, window = attention["head_dim"], keys.integer("attention.sliding_window", 0)
    is_largest = num_layers == _GEMMA_27B_LAYERS
    pattern = keys.count("attention.sliding_window_pattern", _GEMMA_PATTERN)
    cap = keys.number("final_logit_softcapping", 0.0)
    return {
        **attention,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": keys.count("embedding_length") // attention["num_attention_heads"]
        if is_largest
        else size,
        "sliding_window": window or None,
        "layer_types": [
            "full_attention" if not window or (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": rope_config(keys, size, _GEMMA_THETA),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            },
        },
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
    }


_FREQUENCIES: Mapping[str, Part] = {FREQUENCIES: Part(rule=nothing)}
_LLAMA_LAYER: Mapping[str, Part] = {
    **PLAIN,
    "attn_q": Part("self_attn.q_proj", rotary_pairs("attention.head_count")),
    "attn_k": Part("self_attn.k_proj", rotary_pairs("attention.head_count_kv")),
}
_QWEN3_LAYER: Mapping[str, Part] = {**PLAIN, **HEAD_NORMS}
_QWEN3_MOE_LAYER: Mapping[str, Part] = {
    **_QWEN3_LAYER,
    "ffn_gate_inp": Part("mlp.gate"),
    **MLP_EXPERTS,
}
_GEMMA3_LAYER: Mapping[str, Part] = {
    **ATTENTION,
    **DENSE,
    "attn_norm": Part("input_layernorm", one_less),
    "attn_q_norm": Part("self_attn.q_norm", one_less),
    "attn_k_norm": Part("self_attn.k_norm", one_less),
    "post_attention_norm": Part("post_attention_layernorm", one_less),
    "ffn_norm": Part("pre_feedforward_layernorm", one_less),
    "post_ffw_norm": Part("post_feedforward_layernorm", one_less),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _llama, _LLAMA_LAYER, _FREQUENCIES),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _plain, PLAIN),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _qwen3, _QWEN3_LAYER),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, _QWEN3_MOE_LAYER),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _gemma3,
        _GEMMA3_LAYER,
        {"output_norm.weight": Part("model.norm.weight", one_less)},
    ),
}
