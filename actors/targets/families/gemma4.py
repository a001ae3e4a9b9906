"""Gemma 4, text: sandwich norms, two layer geometries, values equal to keys, scaled blocks, a logit cap.

    x = sqrt(H) E[id];  x += post(attention(norm x));  x += post(mlp(norm x));  x *= s;  30 tanh(head(x) / 30)

Sliding and full layers differ in heads, head size, window and rotation. Full layers of most models have no
value projection: v = rms(k_proj u), before the keys' norm and rotation. Scores are not scaled, as q and k are
normed. The mixture of experts (26B-A4B) runs a dense MLP and experts in parallel (`ParallelMlpSpec`).
Images and sound are not read; per-layer embeddings and shared K/V (E2B, E4B) are refused.

`read_assistant` reads the drafter that is published for a target (`model/assistant.py`): such layers, of
queries only, between two projections.

Sources: transformers' modeling_gemma4.py, modeling_gemma4_unified.py (12B), modeling_gemma4_assistant.py,
their configurations' defaults; for the assistant also vLLM's gemma4_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from torch import Tensor

from ....drafter.compute.checkpoint.hf_config import (
    Count,
    ExpertCount,
    HfConfig,
    Json,
    parse,
    text_config,
    wrong,
)
from ....drafter.compute.checkpoint.safetensors_reader import INTEGERS
from ....drafter.compute.layers.moe import MoeRouter
from ....drafter.compute.layers.rope import RopeConfig
from ..model.attention import TargetAttention
from ..model.mlp_spec import GatedMLP, ParallelMlpSpec, RoutedMLP
from ..model.model_spec import LayerSpec, ModelSpec, TensorRule
from .shared.llama_like import TENSORS, PlainConfig, model_of, refuse_rope_scaling

_FULL_INTERVAL = 6  # by default every sixth layer is full
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _must_be_zero(feature: str) -> AfterValidator:
    def check(value: Any) -> int:  # Any: JSON values
        if value:
            raise ValueError(f"must be 0: {feature} (Gemma 4 E2B, E4B) are not served")
        return 0

    return AfterValidator(check)


class LayerGeometry(HfConfig):
    """An entry of `per_layer_config`, as transformers saves it: how a layer differs from the others."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


class Gemma4Config(PlainConfig):
    """The text part of a Gemma 4 config.json, as published, or with transformers' `per_layer_config`.

    Without `hidden_size_per_layer_input` a file has per-layer embeddings.
    """

    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, LayerGeometry] | None = None
    attention_k_eq_v: bool = False
    vocab_size: Count = 262144
    max_position_embeddings: Count = 131072
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: Count | None = 512
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    rope_parameters: dict[str, Any]  # Any: JSON values
    use_bidirectional_attention: Literal["vision"] | None = Field(
        None, description="absent or 'vision': text models with bidirectional attention are not served"
    )
    hidden_size_per_layer_input: Annotated[int, _must_be_zero("per-layer embeddings")] = Field(
        256, validate_default=True
    )
    num_kv_shared_layers: Annotated[int, _must_be_zero("layers that share K and V")] = 0
    enable_moe_block: bool = False
    num_experts: ExpertCount | None = None
    top_k_experts: Count | None = None
    moe_intermediate_size: Count | None = None

    @field_validator("per_layer_config", mode="before")
    @classmethod
    def _check_geometry_only(cls, raw: Any) -> Any:  # Any: JSON values
        for layer, own in raw.items() if isinstance(raw, dict) else ():
            for key in own if isinstance(own, dict) else ():
                if key not in LayerGeometry.model_fields:
                    known = " and ".join(LayerGeometry.model_fields)
                    raise ValueError(f"{layer}.{key} must be absent: layers may only differ in {known}")
        return raw


class UnifiedConfig(Gemma4Config):
    """The keys of 12B (gemma4_unified), a class without per-layer embeddings."""

    max_position_embeddings: Count = 262144
    sliding_window: Count | None = 1024
    hidden_size_per_layer_input: Annotated[int, _must_be_zero("per-layer embeddings")] = 0


def _router_norm(scale_H: Tensor) -> Tensor:
    return scale_H * len(scale_H) ** -0.5


_AT = "layers.{layer}."
_EXPERT = _AT + "experts.{expert}."


def _norm(name: str) -> TensorRule:
    return TensorRule(name=_AT + name, axes=("hidden",))


_TENSORS: Mapping[str, TensorRule] = {
    **TENSORS,
    "attention_out_norm": _norm("post_attention_layernorm.weight"),
    "mlp_norm": _norm("pre_feedforward_layernorm.weight"),
    "mlp_out_norm": _norm("post_feedforward_layernorm.weight"),
    "k_as_v": TENSORS["k"],
    "k_as_v_bias": TENSORS["k_bias"],
    "scalar": TensorRule(name=_AT + "layer_scalar", axes=("one",)),
    "dense_out_norm": _norm("post_feedforward_layernorm_1.weight"),
    "routed_norm": _norm("pre_feedforward_layernorm_2.weight"),
    "routed_out_norm": _norm("post_feedforward_layernorm_2.weight"),
    "router": TensorRule(name=_AT + "router.proj.weight", axes=("experts", "hidden")),
    "router_norm": TensorRule(name=_AT + "router.scale", axes=("hidden",), transform=_router_norm),
    "expert_scale": TensorRule(name=_AT + "router.per_expert_scale", axes=("experts",), is_fp32=True),
    "experts_gate_up": TensorRule(
        name=_AT + "experts.gate_up_proj", axes=("expert", "expert_gate_up", "hidden")
    ),
    "experts_down": TensorRule(name=_AT + "experts.down_proj", axes=("expert", "hidden", "expert_inner")),
    "expert_gate": TensorRule(name=_EXPERT + "gate_proj.weight", axes=("expert_inner", "hidden")),
    "expert_up": TensorRule(name=_EXPERT + "up_proj.weight", axes=("expert_inner", "hidden")),
    "expert_down": TensorRule(name=_EXPERT + "down_proj.weight", axes=("hidden", "expert_inner")),
}


_KV = ("k", "v", "k_as_v", "k_norm", "k_bias", "v_bias", "k_as_v_bias")
_ASSISTANT_TENSORS: Mapping[str, TensorRule] = {
    **{part: rule for part, rule in _TENSORS.items() if part not in _KV},
    "pre_projection": TensorRule(
        name="pre_projection.weight", axes=("hidden", "two_backbone"), is_beside_body=True
    ),
    "post_projection": TensorRule(
        name="post_projection.weight", axes=("backbone", "hidden"), is_beside_body=True
    ),
}


_CLUSTER_TENSORS: Mapping[str, TensorRule] = {
    "centroids": TensorRule(
        name="masked_embedding.centroids.weight", axes=("clusters", "hidden"), is_beside_body=True
    ),
    "token_ordering": TensorRule(
        name="masked_embedding.token_ordering",
        axes=("all_tokens",),
        stored=INTEGERS,
        is_fp32=True,  # exact below 2^24
        is_beside_body=True,
    ),
}


class AssistantKeys(HfConfig):
    """The keys of an assistant's config.json beside its text part."""

    architectures: tuple[Literal["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"]]
    backbone_hidden_size: Count
    use_ordered_embeddings: bool = False
    num_centroids: Count = 2048
    centroid_intermediate_top_k: Count = 32
    tie_word_embeddings: bool = True


class _QueriesOnly(HfConfig):
    num_kv_shared_layers: int = 0  # all layers share, whether the file says so or not


class _AssistantText(_QueriesOnly, Gemma4Config):
    pass


class _UnifiedAssistantText(_QueriesOnly, UnifiedConfig):
    pass


def read(raw: Json, file: str) -> ModelSpec:
    return _read(raw, file, Gemma4Config)


def read_unified(raw: Json, file: str) -> ModelSpec:
    return _read(raw, file, UnifiedConfig)


def read_assistant(raw: Json, file: str) -> ModelSpec:
    """Return an assistant's layers, with its projections among the tensors."""
    keys, text = parse(AssistantKeys, raw, file), text_config(raw)
    spec = _read(text, file, _UnifiedAssistantText if "Unified" in keys.architectures[0] else _AssistantText)
    if (shared := text.get("num_kv_shared_layers")) not in (None, 0, spec.num_layers):
        wanted = f"num_hidden_layers ({spec.num_layers}): all layers read the target's K and V"
        raise wrong(file, "text_config.num_kv_shared_layers", shared, wanted)
    clusters = _clusters(keys, spec.vocab_size, file)
    mixers = [replace(spec.attention(i), queries_only=True) for i in range(spec.num_layers)]
    layers = (replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True))
    return replace(
        spec,
        layers=tuple(layers),
        tensors=_ASSISTANT_TENSORS if clusters is None else {**_ASSISTANT_TENSORS, **_CLUSTER_TENSORS},
        tied_head=keys.tie_word_embeddings,
        backbone_size=keys.backbone_hidden_size,
        clusters=clusters,
    )


def _clusters(keys: AssistantKeys, vocab_size: int, file: str) -> tuple[int, int] | None:
    if not keys.use_ordered_embeddings:
        return None
    if vocab_size % keys.num_centroids:
        raise wrong(file, "num_centroids", keys.num_centroids, f"a divisor of vocab_size ({vocab_size})")
    if keys.centroid_intermediate_top_k > keys.num_centroids:
        wanted = f"at most num_centroids ({keys.num_centroids})"
        raise wrong(file, "centroid_intermediate_top_k", keys.centroid_intermediate_top_k, wanted)
    return keys.num_centroids, keys.centroid_intermediate_top_k


def _read(raw: Json, file: str, form: type[Gemma4Config]) -> ModelSpec:
    # hidden_activation is Gemma's key; hidden_act, which transformers may also write, has no meaning.
    raw = {key: value for key, value in raw.items() if key != "hidden_act"}
    if raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": _ROPES}
    refuse_rope_scaling(raw, file)
    config = parse(form, raw, file)
    for kind in _ROPES:  # a single setting for all layers is not supported
        if kind not in config.rope_parameters:
            wanted = "an object with the rotary settings of these layers"
            raise wrong(file, f"rope_parameters.{kind}", None, wanted)
    mlp = _mlp(config, file)
    layers = [
        LayerSpec(mixer=_attention(raw, file, config, layer, kind), mlp=mlp, sandwich=True, scalar=True)
        for layer, kind in enumerate(_kinds(config, file))
    ]
    return replace(
        model_of(config, tuple(layers), _TENSORS),
        embed_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping or None,
        fp32_norms=True,
    )


def _kinds(config: Gemma4Config, file: str) -> tuple[str, ...]:
    """Return each layer's type; the last one is always full, as in transformers."""
    derived = tuple(
        "sliding_attention" if (i + 1) % _FULL_INTERVAL else "full_attention"
        for i in range(config.num_hidden_layers)
    )
    return (*config.types(file, derived)[:-1], "full_attention")


def _mlp(config: Gemma4Config, file: str) -> GatedMLP | ParallelMlpSpec:
    dense = GatedMLP(inner_size=config.intermediate_size, activation="gelu_tanh")
    if not config.enable_moe_block:
        return dense
    count, top_k, inner = config.num_experts, config.top_k_experts, config.moe_intermediate_size
    if count is None or top_k is None or inner is None:
        keys = {"num_experts": count, "top_k_experts": top_k, "moe_intermediate_size": inner}
        missing = next(key for key, value in keys.items() if value is None)
        raise wrong(file, missing, None, "a positive integer, for enable_moe_block")
    if top_k > count:
        raise wrong(file, "top_k_experts", top_k, f"at most num_experts ({count})")
    router = MoeRouter(num_experts=count, top_k=top_k, score="softmax", normed_input=True, expert_scale=True)
    return ParallelMlpSpec(
        dense=dense, routed=RoutedMLP(router=router, inner_size=inner, activation="gelu_tanh")
    )


def _attention(raw: Json, file: str, config: Gemma4Config, layer: int, kind: str) -> TargetAttention:
    head_dim, num_kv_heads = _geometry(config, file, layer, kind)
    return TargetAttention(
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig.read(raw, head_dim, file, layer_type=kind),
        scale=1.0,
        window=config.window_of(kind, file),
        qk_norm=True,
        v_norm=True,
        k_is_v=config.attention_k_eq_v and kind == "full_attention",
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _geometry(config: Gemma4Config, file: str, layer: int, kind: str) -> tuple[int, int]:
    """Return a layer's head dim and kv heads; full attention and `per_layer_config` may have others."""
    own: LayerGeometry | None = None
    if config.per_layer_config is not None:
        own = config.per_layer_config.get(str(layer))
    elif kind == "full_attention":
        heads = config.num_global_key_value_heads if config.attention_k_eq_v else None
        own = LayerGeometry(head_dim=config.global_head_dim, num_key_value_heads=heads)
    if own is None:
        own = LayerGeometry()
    head_dim = own.head_dim or config.head_size(file)
    num_kv_heads = own.num_key_value_heads or config.kv_heads(file)
    if head_dim % 2:
        raise wrong(file, "global_head_dim", head_dim, "even")
    if config.num_attention_heads % num_kv_heads:
        wanted = f"a divisor of num_attention_heads ({config.num_attention_heads})"
        raise wrong(file, "num_global_key_value_heads", num_kv_heads, wanted)
    return head_dim, num_kv_heads
