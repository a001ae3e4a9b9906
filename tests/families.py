"""A row per family: the tiny random model that transformers builds of it. What one must do, all must.

Shapes are as small as they can be with every feature at work: windows shorter than the prompts, two kinds of
layers where a family has two, biases and norms off their defaults (`tiny.make_tiny_target` adds noise), a
hidden size whose root is no round number where the embedding is scaled by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers


@dataclass(frozen=True)
class TinyFamily:
    """A family's classes in transformers, and what its configuration says beside the common shape.

    Attributes:
        changes: keys of the configuration; None leaves a common key out.
    """

    config: type[transformers.PretrainedConfig]
    model: type[transformers.PreTrainedModel]
    changes: dict[str, Any] = field(default_factory=dict)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Of a head's 8 pairs one is in between, and there the ends of the ramp, not rounded, show.
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

FAMILIES = {
    "qwen3": TinyFamily(
        transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"tie_word_embeddings": True}
    ),
    "qwen3_moe": TinyFamily(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "llama": TinyFamily(
        transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": _LLAMA3}
    ),
    "qwen2": TinyFamily(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"head_dim": None}),
    "mistral": TinyFamily(transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 9}),
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
    ),
}
