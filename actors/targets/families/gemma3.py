"""Gemma 3, text: sandwich norms that store w of 1 + w, GELU, rotations by layer type (sliding, full).

    x = sqrt(H) E[id];  x += post(attention(norm x));  x += post(down(gelu(gate norm x) * up norm x))

Sources: transformers' modeling_gemma3.py and its configuration's defaults, as published files omit much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from ....drafter.compute.checkpoint.hf_config import Count, Json, Off, parse
from ....drafter.compute.layers.rope import RopeConfig
from ..model.attention import TargetAttention
from ..model.mlp_spec import GatedMLP
from ..model.model_spec import LayerSpec, ModelSpec, TensorRule
from .shared.llama_like import TENSORS, PlainConfig, model_of

_THETA = {"full_attention": 1e6, "sliding_attention": 1e4}


class Gemma3Config(PlainConfig):
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    vocab_size: Count = 262208
    max_position_embeddings: Count = 131072
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256.0
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    attention_bias: bool = False
    attn_logit_softcapping: Off = False
    final_logit_softcapping: Off = False
    use_bidirectional_attention: Off = False


def one_plus(weight: Tensor) -> Tensor:
    """Return 1 + w, of a norm in fp32 (`ModelSpec.fp32_norms`): bf16 would round it."""
    return 1.0 + weight


def _norm(name: str, rule: TensorRule) -> TensorRule:
    return replace(rule, name=name, transform=one_plus)


_AT = "layers.{layer}."
# Norms of a block; Muse-Glimmer stores the same.
SANDWICH_NORMS: Mapping[str, TensorRule] = {
    "attention_norm": _norm(_AT + "input_layernorm.weight", TENSORS["attention_norm"]),
    "attention_out_norm": _norm(_AT + "post_attention_layernorm.weight", TENSORS["attention_norm"]),
    "mlp_norm": _norm(_AT + "pre_feedforward_layernorm.weight", TENSORS["attention_norm"]),
    "mlp_out_norm": _norm(_AT + "post_feedforward_layernorm.weight", TENSORS["attention_norm"]),
}
_NORMS = {
    "final_norm": _norm("norm.weight", TENSORS["final_norm"]),
    "q_norm": _norm(_AT + "self_attn.q_norm.weight", TENSORS["q_norm"]),
    "k_norm": _norm(_AT + "self_attn.k_norm.weight", TENSORS["k_norm"]),
}
_TENSORS: Mapping[str, TensorRule] = {**TENSORS, **SANDWICH_NORMS, **_NORMS}


def read(raw: Json, file: str) -> ModelSpec:
    # hidden_activation is Gemma's key; hidden_act, which transformers also writes, has no meaning.
    config = parse(Gemma3Config, {key: value for key, value in raw.items() if key != "hidden_act"}, file)
    pattern = config.sliding_window_pattern
    derived = tuple(
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(config.num_hidden_layers)
    )
    layers = [
        LayerSpec(
            mixer=_attention(raw, file, config, kind),
            mlp=GatedMLP(inner_size=config.intermediate_size, activation="gelu_tanh"),
            sandwich=True,
        )
        for kind in config.types(file, derived)
    ]
    scale = config.hidden_size**0.5
    return replace(model_of(config, tuple(layers), _TENSORS), embed_scale=scale, fp32_norms=True)


def _attention(raw: Json, file: str, config: Gemma3Config, kind: str) -> TargetAttention:
    size = config.head_size(file)
    rope = RopeConfig.read(raw, size, file, layer_type=kind, default_theta=_THETA[kind])
    return replace(
        config.plain_attention(file, rope, size),
        scale=config.query_pre_attn_scalar**-0.5,
        window=config.window_of(kind, file),
        qk_norm=True,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
