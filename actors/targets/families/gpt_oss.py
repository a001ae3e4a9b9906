"""gpt-oss: sinks, biases, alternating sliding layers, experts with a clamped SwiGLU and 4-bit weights.

    x += o(attention(norm x), sinks) + b;  x += sum of w_j (down_j(act(gate_up_j u + b_j)) + c_j),  u = norm x

Files have the experts packed, as on the Hub, or as [E, inputs, outputs]; gate and up rows are interleaved.
Sources: transformers' modeling_gpt_oss.py and configuration_gpt_oss.py, with the latter's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field
from torch import Tensor

from ....drafter.compute.checkpoint.hf_config import Count, ExpertCount, Json, parse
from ....drafter.compute.checkpoint.safetensors_reader import BYTES
from ....drafter.compute.layers.moe import MoeRouter
from ....drafter.compute.layers.rope import RopeConfig
from ..model.mlp_spec import RoutedMLP
from ..model.model_spec import Axis, LayerSpec, ModelSpec, TensorRule
from .shared.llama_like import TENSORS, PlainConfig, model_of

_ALPHA = 1.702  # alpha of `swiglu_clamped`
_THETA = 150000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _check_alpha(value: float) -> float:
    if value != _ALPHA:
        raise ValueError(f"must be {_ALPHA}: other values are not supported")
    return value


class GptOssConfig(PlainConfig):
    intermediate_size: Count = 2880
    head_dim: Count | None = 64
    max_position_embeddings: Count = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = 128
    attention_bias: bool = True
    num_local_experts: ExpertCount = Field(validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Count = Field(
        validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token")
    )
    swiglu_limit: Annotated[float, Field(gt=0, description="a positive number")] = 7.0
    swiglu_alpha: Annotated[float, AfterValidator(_check_alpha)] = _ALPHA
    # + Published files do not state a dtype.
    checkpoint_dtype: str = Field("bfloat16", validation_alias=AliasChoices("dtype", "torch_dtype"))


def _deinterleave(rows: Tensor) -> Tensor:
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _inputs_last(weight_EIO: Tensor) -> Tensor:
    return weight_EIO.transpose(1, 2).contiguous()


def _inputs_last_deinterleave(weight_EIO: Tensor) -> Tensor:
    return _deinterleave(weight_EIO.transpose(1, 2))


def _rule(name: str, *axes: Axis, **more: Any) -> TensorRule:  # Any: fields of TensorRule
    return TensorRule(name="layers.{layer}." + name, axes=axes, **more)


_PAIRS: tuple[Axis, Axis] = ("expert", "expert_pairs")
_DOWN: tuple[Axis, Axis] = ("expert", "hidden")
_GATE_UP_PROJ, _DOWN_PROJ = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_TENSORS: Mapping[str, TensorRule] = {
    **{part: rule for part, rule in TENSORS.items() if "mlp." not in rule.name},
    "sinks": _rule("self_attn.sinks", "q_heads", is_fp32=True),
    "router": _rule("mlp.router.weight", "experts", "hidden"),
    "router_bias": _rule("mlp.router.bias", "experts"),
    "experts_gate_up_bias": _rule(f"{_GATE_UP_PROJ}_bias", *_PAIRS, transform=_deinterleave),
    "experts_down_bias": _rule(f"{_DOWN_PROJ}_bias", *_DOWN),
}
_PLAIN: Mapping[str, TensorRule] = {
    "experts_gate_up": _rule(
        _GATE_UP_PROJ, "expert", "hidden", "expert_pairs", transform=_inputs_last_deinterleave
    ),
    "experts_down": _rule(_DOWN_PROJ, "expert", "expert_inner", "hidden", transform=_inputs_last),
}
_PACKED: Mapping[str, TensorRule] = {
    "experts_gate_up_blocks": _rule(
        f"{_GATE_UP_PROJ}_blocks",
        *_PAIRS,
        "hidden_blocks",
        "block_bytes",
        transform=_deinterleave,
        stored=BYTES,
    ),
    "experts_gate_up_scales": _rule(
        f"{_GATE_UP_PROJ}_scales", *_PAIRS, "hidden_blocks", transform=_deinterleave, stored=BYTES
    ),
    "experts_down_blocks": _rule(
        f"{_DOWN_PROJ}_blocks", *_DOWN, "expert_inner_blocks", "block_bytes", stored=BYTES
    ),
    "experts_down_scales": _rule(f"{_DOWN_PROJ}_scales", *_DOWN, "expert_inner_blocks", stored=BYTES),
}


def read(raw: Json, file: str) -> ModelSpec:
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = {**raw, "rope_scaling": _YARN}
    config = parse(GptOssConfig, raw, file)
    size = config.head_size(file)
    derived = tuple(
        "full_attention" if i % 2 else "sliding_attention" for i in range(config.num_hidden_layers)
    )
    attention = config.plain_attention(file, RopeConfig.read(raw, size, file, default_theta=_THETA), size)
    bias = config.attention_bias
    attention = replace(attention, bias=bias, out_bias=bias, sinks=True)
    layers = [
        LayerSpec(
            mixer=replace(attention, window=config.window_of(kind, file)),
            mlp=RoutedMLP(
                router=MoeRouter(
                    num_experts=config.num_local_experts,
                    top_k=config.num_experts_per_tok,
                    score="softmax",
                    choose_first=True,
                    renormalize=False,
                    bias=True,
                ),
                inner_size=config.intermediate_size,
                activation="swiglu_clamped",
                limit=config.swiglu_limit,
                bias=True,
            ),
        )
        for kind in config.types(file, derived)
    ]
    return model_of(config, tuple(layers), {**_TENSORS, **_PLAIN, **_PACKED})
