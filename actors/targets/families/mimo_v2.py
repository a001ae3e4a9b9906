"""MiMo-V2: smaller, scaled values; sliding layers with sinks and more K/V heads; routed experts.

    x += o(attention(q, k, scale v));  x += sum over the chosen of  w_e expert_e(u), or one MLP;  u = norm x

`sliding_window_size` counts the tokens before a row, transformers' `sliding_window` includes the row. The
scale of values is multiplied into v's rows at load. Published and transformers' names differ; both are read.
The layers for multi-token prediction (`model.mtp.`), three in published files, slide and have a dense MLP.

Sources: transformers' modeling_mimo_v2_flash.py and configuration_mimo_v2_flash.py; a published file; vLLM's
mimo_v2_mtp.py; SGLang's mimo_v2_nextn.py and multi_layer_eagle_worker_v2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import AliasChoices, Field
from torch import mul

from ....drafter.compute.checkpoint.hf_config import Count, Json, parse, wrong
from ....drafter.compute.layers.rope import RopeConfig
from ..model.attention import TargetAttention
from ..model.mlp_spec import GatedMLP
from ..model.model_spec import LayerSpec, ModelSpec, MtpSpec, TensorRule, Transform
from .shared.deepseek_moe import EXPERT_TENSORS, SigmoidExpertsConfig
from .shared.llama_like import model_of, refuse_rope_scaling

_ROTARY_FACTOR = 0.334  # rotated share of a head if config.json does not say: 64 of 192 dimensions
_THETA = {"full_attention": 5e6, "sliding_attention": 1e4}
_KINDS = ("full_attention", "sliding_attention")


class MiMoV2Config(SigmoidExpertsConfig):
    rms_norm_eps: float = Field(1e-5, validation_alias=AliasChoices("rms_norm_eps", "layernorm_epsilon"))
    head_dim: Count | None = 192
    v_head_dim: Count = 128
    attention_bias: bool = False
    attention_value_scale: float = 0.707
    sliding_window: Count | None = 129
    sliding_window_size: Count | None = None
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    hybrid_layer_pattern: tuple[Literal[0, 1], ...] | None = None
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    moe_layer_freq: tuple[Literal[0, 1], ...] | None = None
    scoring_func: Literal["sigmoid"] = "sigmoid"

    @property
    def has_windows(self) -> bool:
        return (self.sliding_window or self.sliding_window_size) is not None

    def kinds(self, file: str) -> tuple[str, ...]:
        """Return each layer's type; by default the first and every sixth are full."""
        count = self.num_hidden_layers
        default = tuple(_KINDS[i != 0 and (i + 1) % 6 != 0] for i in range(count))
        if self.layer_types is None and self.hybrid_layer_pattern is not None:
            self._check_length(self.hybrid_layer_pattern, "hybrid_layer_pattern", file)
            default = tuple(_KINDS[slides] for slides in self.hybrid_layer_pattern)
        return self.types(file, default)

    def are_routed(self, file: str) -> tuple[bool, ...]:
        if self.mlp_layer_types is not None:
            self._check_length(self.mlp_layer_types, "mlp_layer_types", file)
            return tuple(kind == "sparse" for kind in self.mlp_layer_types)
        if self.moe_layer_freq is not None:
            self._check_length(self.moe_layer_freq, "moe_layer_freq", file)
            return tuple(bool(each) for each in self.moe_layer_freq)
        return tuple(i > 0 for i in range(self.num_hidden_layers))

    def _check_length(self, entries: tuple[object, ...], key: str, file: str) -> None:
        count = self.num_hidden_layers
        if len(entries) != count:
            raise wrong(file, key, entries, f"one entry for each of num_hidden_layers ({count})")

    def attention(self, raw: Json, file: str, kind: str) -> TargetAttention:
        slides = kind == "sliding_attention"
        heads, kv_heads = self.num_attention_heads, self.kv_heads(file)
        size, v_size = self.head_size(file), self.v_head_dim
        window = None
        if slides:
            heads = self.swa_num_attention_heads or heads
            kv_heads = self.swa_num_key_value_heads or 2 * kv_heads
            size, v_size = self.swa_head_dim or size, self.swa_v_head_dim or v_size
            before = self.sliding_window_size
            window = self.window_of(kind, file) if before is None else before + 1
        if v_size > size:
            raise wrong(file, "v_head_dim", v_size, f"at most {size}, the size of keys")
        return TargetAttention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            v_head_dim=v_size,
            rope=RopeConfig.read(raw, size, file, layer_type=kind, default_theta=_THETA[kind]),
            scale=size**-0.5,
            window=window,
            bias=self.attention_bias,
            sinks=self.add_swa_attention_sink_bias if slides else self.add_full_attention_sink_bias,
        )


def _tensors(value_scale: float) -> Mapping[str, TensorRule]:
    scaled = Transform(mul, (value_scale,))
    sinks = "layers.{layer}.self_attn.attention_sink_bias"
    return {
        **EXPERT_TENSORS,
        "v": replace(EXPERT_TENSORS["v"], transform=scaled),
        "v_bias": replace(EXPERT_TENSORS["v_bias"], transform=scaled),
        "sinks": TensorRule(name=sinks, axes=("q_heads",), is_fp32=True),
    }


def read(raw: Json, file: str) -> ModelSpec:
    raw = {"partial_rotary_factor": _ROTARY_FACTOR, **raw}
    if raw.get("attention_value_scale", 1.0) is None:  # an explicit null means no scale, unlike a missing key
        raw["attention_value_scale"] = 1.0
    refuse_rope_scaling(raw, file)
    config = parse(MiMoV2Config, raw, file)
    routed, dense = config.routed(file), GatedMLP(inner_size=config.intermediate_size)
    attention = {kind: config.attention(raw, file, kind) for kind in set(config.kinds(file))}
    layers = tuple(
        LayerSpec(mixer=attention[kind], mlp=routed if is_routed else dense)
        for kind, is_routed in zip(config.kinds(file), config.are_routed(file), strict=True)
    )
    sliding = config.attention(raw, file, "sliding_attention") if config.has_windows else None
    return replace(
        model_of(config, layers, _tensors(config.attention_value_scale)),
        mtp=None if sliding is None else _mtp(LayerSpec(mixer=sliding, mlp=dense)),
    )


def _mtp(layer: LayerSpec) -> MtpSpec:
    spec = MtpSpec.after_body(layer, "mtp.layers.{layer}.", "final_layernorm.weight")
    return replace(spec, num_layers=3, renamed={"post_attention_layernorm": "pre_mlp_layernorm"})
