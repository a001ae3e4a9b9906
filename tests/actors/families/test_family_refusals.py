"""What a family does not compute is refused by its config.json, with the key and the value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manta.cluster.errors import CheckpointError
from support.published.published import CONFIGS, spec_of_config

QUARK = {"quantization_config": {"quant_method": "quark"}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
ONE_SIZE = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}
HUB_KEYS = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
GATED_DELTA: list[tuple[dict[str, Any], str]] = [
    ({"linear_num_value_heads": 9}, "value_heads=9 must be a multiple of linear_num_key_heads"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types.*at least one full_attention"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"attn_output_gate": False}, "attn_output_gate=False must be True"),
    ({"attention_bias": True}, "attention_bias=True must be absent"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be an integer of at least 2"),
]
INDEXER = "an indexer that chooses which keys a row sees"
# A tiny target's family or a published model, changes of its config.json (None removes a key), and words.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 must be absent"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 must be absent"),
    ("gemma3", {"hidden_activation": "relu"}, "hidden_activation='relu' must be 'gelu_pytorch_tanh'"),
    ("gemma3", {"layer_types": ["full_attention"] * 3}, r"one entry for each of num_hidden_layers \(4\)"),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ("qwen2", {"num_key_value_heads": 3}, r"a divisor of num_attention_heads \(4\)"),
    ("mistral", {"sliding_window": -1}, "sliding_window=-1 must be a positive integer"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
    ("llama", {"head_dim": 15}, "head_dim=15 must be even"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha=1.5 must be 1\.702"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0 must be a positive number"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 are served for gpt-oss alone"),
    ("glm4_moe", {"num_experts_per_tok": 9}, r"at most 8 \(n_routed_experts\)"),
    ("glm4_moe", {"n_group": 3}, r"n_group=3 must be a divisor of n_routed_experts \(8\)"),
    ("glm4_moe", {"topk_group": 5}, r"topk_group=5 must be at most 4 \(n_group\)"),
    ("mimo_v2", {"layer_types": None, "hybrid_layer_pattern": [0]}, "hybrid_layer_pattern.*one entry"),
    ("mimo_v2", {"mlp_layer_types": ["dense"]}, "mlp_layer_types.*one entry for each"),
    ("mimo_v2", {"v_head_dim": 25}, "v_head_dim=25 must be at most 24"),
    ("mimo_v2", {"scoring_func": "softmax"}, "scoring_func='softmax' must be 'sigmoid'"),
    ("muse_glimmer", {"text_config": {}}, "hidden_size is missing"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list.*must be all 1"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64 must be absent"),
    ("minimax_m2", QUARK, "quant_method='quark' must be one of fp8,.*use the unquantized checkpoint"),
    ("minimax_m2", ONE_SIZE, "weight_block_size.*two positive integers"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 must be at most num_experts \(8\)"),
    ("gpt_oss", {**MXFP4, "intermediate_size": 100}, "intermediate_size=100 must be a multiple of 32"),
    *((family, *refused) for family in ("qwen3_5", "qwen3_next") for refused in GATED_DELTA),
    (
        "gemma4",
        {"hidden_size_per_layer_input": 256},
        "hidden_size_per_layer_input=256 must be 0: per-layer embed",
    ),
    ("gemma4", {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is missing; it must be 0"),
    ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 must be 0: layers that share K and V"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' must be absent or"),
    ("gemma4", {"hidden_activation": "silu"}, "hidden_activation='silu' must be 'gelu_pytorch_tanh'"),
    ("gemma4", {"top_k_experts": None}, "top_k_experts is missing; it must be a positive integer"),
    ("gemma4", {"num_experts": 10**6}, "num_experts=1000000 must be a positive integer up to 8192"),
    ("gemma4", {"top_k_experts": 9}, r"top_k_experts=9 must be at most num_experts \(8\)"),
    (
        "gemma4",
        HUB_KEYS | {"num_global_key_value_heads": 3},
        "num_global_key_value_heads=3 must be a divisor",
    ),
    ("gemma4", HUB_KEYS | {"global_head_dim": 31}, "global_head_dim=31 must be even"),
    (
        "gemma4",
        {"per_layer_config": {"1": {"sliding_window": 4}}},
        r"per_layer_config\.1\.sliding_window=4 must be",
    ),
    ("gemma4", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.sliding_attention is missing"),
    ("DeepSeek-V3", {"architectures": ["GlmMoeDsaForCausalLM"]}, INDEXER),
    ("DeepSeek-V3", {"architectures": ["DeepseekV32ForCausalLM"]}, INDEXER),
    ("DeepSeek-V3", {"architectures": ["DeepseekV4ForCausalLM"]}, "hyper-connections"),
    ("DeepSeek-V3", {"index_topk": 2048}, "index_topk=2048 must be absent"),
    ("DeepSeek-V3", {"attention_bias": True}, "attention_bias=True must be absent"),
    ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2 must be 1"),
    ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method='greedy' must be 'noaux_tc'"),
    ("DeepSeek-V3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
    ("DeepSeek-V3", QUARK, "quant_method='quark' must be one of fp8,"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_unsupported_features_are_refused_by_name(
    tiny_target: Callable[[str], Path], tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    raw = CONFIGS[name] if name in CONFIGS else json.loads((tiny_target(name) / "config.json").read_text())
    config = {key: value for key, value in {**raw, **changes}.items() if value is not None}
    with pytest.raises(CheckpointError, match=words):
        spec_of_config(config, tmp_path)
