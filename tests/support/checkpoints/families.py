"""A row per family: the tiny random model that transformers builds of it. Every test runs on all rows.

Shapes are as small as they can be with every feature at work: windows shorter than the prompts, two kinds of
layers where a family has two, biases and norms off their defaults (`tiny.make_tiny_target` adds noise), a
hidden size whose root is no round number where the embedding is scaled by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers

from support.checkpoints.rope_configs import GPT_OSS, LLAMA3

TINY_VOCAB = 128


@dataclass(frozen=True)
class TinyFamily:
    """A family's classes in transformers, and its changes of the common config.

    Attributes:
        changes: keys of the config; None removes a common key.
        lean: whether the short losslessness grid has only one cell for it, a batch of eight.
        composed: whether it consists of parts of other rows: tests of ranks and the short grid skip it.
    """

    config: Callable[..., transformers.PretrainedConfig]
    model: type[transformers.PreTrainedModel]
    changes: dict[str, Any] = field(default_factory=dict)
    lean: bool = False
    composed: bool = False


def _muse_glimmer(**text: Any) -> transformers.PretrainedConfig:
    """Its text part, with an unused vision part."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4}
    ends = {key: text.pop(key) for key in ("tie_word_embeddings", "dtype")}
    return transformers.MuseGlimmerConfig(
        text_config=text, vision_config=vision, out_hidden_size=64, projector_hidden_size=16, **ends
    )


_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Both of DeepSeek's factors, unequal: on cosines and sines, and on scores.
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GROUPS = {"n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 48, **_EXPERTS}
_SLIDE_FIRST = ["sliding_attention", "full_attention"] * 2
_FULL_FIRST = ["full_attention", "sliding_attention"] * 2

# A key head serves two value heads of another size, and there are more than ranks.
_GATED_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}

# Of a head's 8 pairs one is in between, and there the ends of the ramp, not rounded, show.
GPT_OSS_YARN = {**GPT_OSS, "rope_theta": 150000.0, "original_max_position_embeddings": 64}

FAMILIES = {
    "qwen3": TinyFamily(
        transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"tie_word_embeddings": True}
    ),
    "qwen3_moe": TinyFamily(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 8, **_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
        lean=True,
    ),
    "qwen3_next": TinyFamily(
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {**_GATED_DELTA, **_SHARED, "mlp_only_layers": [1]},
        composed=True,
    ),
    "qwen3_5": TinyFamily(
        transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, _GATED_DELTA, lean=True
    ),
    "qwen3_5_moe": TinyFamily(
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        {**_GATED_DELTA, **_SHARED},
        composed=True,
    ),
    "llama": TinyFamily(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
        lean=True,
    ),
    "qwen2": TinyFamily(
        transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"head_dim": None}, lean=True
    ),
    "mistral": TinyFamily(
        transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 9}, lean=True
    ),
    "gemma3": TinyFamily(
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "hidden_size": 72,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "rope_parameters": _GEMMA3_ROPES,
        },
        lean=True,
    ),
    "gemma4": TinyFamily(
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            "hidden_size": 72,
            "tie_word_embeddings": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 9,
            "final_logit_softcapping": 2.0,  # logits of a tiny model feel no cap of 30
            "layer_types": _SLIDE_FIRST,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        lean=True,
    ),
    "muse_glimmer": TinyFamily(
        _muse_glimmer,
        transformers.MuseGlimmerForConditionalGeneration,
        {
            "sliding_window": 9,
            "layer_types": _SLIDE_FIRST,
            "layer_rope_theta": [5e5, 0] * 2,
            "post_norm_eps": 0.01,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        lean=True,
    ),
    "gpt_oss": TinyFamily(
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 0.3,
            "rope_parameters": GPT_OSS_YARN,
        },
        lean=True,
    ),
    "glm4_moe": TinyFamily(
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            **_EXPERTS,
            **_GROUPS,
            "routed_scaling_factor": 2.5,
        },
        lean=True,
    ),
    "minimax_m2": TinyFamily(
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {
            **{"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3},
            **{"rotary_dim": 8, "rms_norm_eps": 1e-2},
        },
        lean=True,
    ),
    "deepseek_v3": TinyFamily(
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "rms_norm_eps": 1e-2,  # which the norms of bottlenecks have not
            "rope_parameters": DEEPSEEK_YARN,
            "n_routed_experts": 16,
            **_GROUPS,
            **_EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.827,
        },
        lean=True,
    ),
    "mimo_v2": TinyFamily(
        transformers.MiMoV2FlashConfig,
        transformers.MiMoV2FlashForCausalLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 9,
            "layer_types": _FULL_FIRST,
            "n_routed_experts": 8,
            **_EXPERTS,
            "routed_scaling_factor": 1.5,
        },
        lean=True,
    ),
}
