"""Qwen3.5, 3.6 and 3.8, and Qwen3-Next (Qwen3-Coder-Next), text: gated delta nets, optionally with experts.

    x += o(rms_w(rule(conv(q, k, v), beta, g)) silu(z))   or   x += o(attention(q, k, v) sigmoid(gate))
    x += mlp(norm x)

Every fourth layer has gated attention. Norms store w of 1 + w, except for the delta net's own. A head's rows
of q_proj are its queries, then its gate. Image positions (mrope) equal text positions if there is only text.
Parts for images are ignored. The layer for multi-token prediction (`mtp.`) has gated attention, and experts
if the model has any. Qwen3-Next groups projections by key head:

    in_proj_qkvz   q k v.. z.. of the first key head and of the value heads that it serves, then of the next
    in_proj_ba     b.. a.. likewise

Sources: transformers' modeling_{qwen3_5,qwen3_5_moe,qwen3_next}.py and the defaults of their configurations;
vLLM's qwen3_5_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from ....cluster.pages.recurrent_state_spec import RecurrentStateSpec
from ....drafter.compute.checkpoint.hf_config import Count, ExpertCount, Json, Off, parse, wrong
from ....drafter.compute.layers.rope import RopeConfig
from ..model.attention import TargetAttention
from ..model.delta_net import DeltaNet
from ..model.mlp_spec import GatedMLP, RoutedMLP
from ..model.model_spec import LayerSpec, ModelSpec, MtpSpec, TensorRule, Transform
from .gemma3 import one_plus
from .shared.llama_like import TENSORS, PlainConfig, model_of
from .shared.qwen_moe import EXPERT_TENSORS, SHARED_TENSORS, SoftmaxExpertsConfig

_ROTARY_FACTOR = 0.25  # rotated share of a head if config.json does not say


class GatedDeltaConfig(PlainConfig):
    KINDS: ClassVar[tuple[str, ...]] = ("linear_attention", "full_attention")

    head_dim: Count | None = 256
    attention_bias: Off = False
    attn_output_gate: Literal[True] = True
    full_attention_interval: Count = 4
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: int = Field(4, ge=2, description="an integer of at least 2")
    mtp_num_hidden_layers: int = Field(1, ge=0, description="an integer that is not negative")
    mtp_use_dedicated_embeddings: bool = False

    def mixers(self, raw: Json, file: str) -> tuple[TargetAttention | DeltaNet, ...]:
        """Return each layer's mixer; by default every `full_attention_interval`-th layer has attention."""
        period, count = self.full_attention_interval, self.num_hidden_layers
        kinds = tuple(self.KINDS[(i + 1) % period == 0] for i in range(count))
        kinds = self.types(file, kinds)
        if "full_attention" not in kinds:
            raise wrong(
                file, "layer_types", kinds, "a list with at least one full_attention: sequences must have K/V"
            )
        delta, attention = DeltaNet(geometry=self._geometry(file)), self._attention(raw, file)
        return tuple(attention if kind == "full_attention" else delta for kind in kinds)

    def _geometry(self, file: str) -> RecurrentStateSpec:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise wrong(
                file, "linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})"
            )
        sizes = (self.linear_key_head_dim, self.linear_value_head_dim, self.linear_conv_kernel_dim)
        return RecurrentStateSpec(keys, values, *sizes)

    def _attention(self, raw: Json, file: str) -> TargetAttention:
        size = self.head_size(file)
        rope = RopeConfig.read({"partial_rotary_factor": _ROTARY_FACTOR, **raw}, size, file)
        return replace(self.plain_attention(file, rope, size), qk_norm=True, gate=True)


def read_gated_delta(
    raw: Json,
    file: str,
    config: GatedDeltaConfig,
    mlps: tuple[GatedMLP | RoutedMLP, ...],
    tensors: Mapping[str, TensorRule],
) -> ModelSpec:
    """Return the model with `mlps`; `tensors`: delta nets' projections, and those that dense MLPs lack."""
    mixers = config.mixers(raw, file)
    layers = tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    tensors = {**_tensors(config.head_size(file)), **tensors}
    return replace(model_of(config, layers, tensors), fp32_norms=True, mtp=_mtp(config, layers))


def _mtp(config: GatedDeltaConfig, layers: tuple[LayerSpec, ...]) -> MtpSpec | None:
    if not config.mtp_num_hidden_layers or config.mtp_use_dedicated_embeddings:
        return None
    mixer = next(layer.mixer for layer in layers if isinstance(layer.mixer, TargetAttention))
    mlp = next((layer.mlp for layer in layers if layer.routed is not None), layers[0].mlp)
    return MtpSpec(
        layer=LayerSpec(mixer=mixer, mlp=mlp),
        prefix="mtp.layers.0.",
        embed_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        combine="mtp.fc.weight",
        final_norm="mtp.norm.weight",
        is_beside_body=True,
    )


def _half_of_each_head(head_dim: int, which: int, rows_OH: Tensor) -> Tensor:
    return rows_OH.unflatten(0, (-1, 2, head_dim))[:, which].flatten(0, 1)


def _negative_exp(a_log_V: Tensor) -> Tensor:
    return -a_log_V.exp()


def _squeeze_kernel(kernel_C1T: Tensor) -> Tensor:
    return kernel_C1T.squeeze(1)


DELTA = "layers.{layer}.linear_attn."
_NORMS = ("attention_norm", "mlp_norm", "final_norm", "q_norm", "k_norm")


def _tensors(head_dim: int) -> Mapping[str, TensorRule]:
    rows = {"q": 0, "attention_gate": 1}
    q_and_gate = replace(TENSORS["q"], axes=("q_and_gate", "hidden"))
    return {
        **TENSORS,
        **{part: replace(TENSORS[part], transform=one_plus) for part in _NORMS},
        **{
            part: replace(q_and_gate, transform=Transform(_half_of_each_head, (head_dim, which)))
            for part, which in rows.items()
        },
        "delta_conv": TensorRule(
            name=DELTA + "conv1d.weight",
            axes=("delta_channels", "one", "delta_taps"),
            transform=_squeeze_kernel,
            is_fp32=True,
        ),
        "delta_rate": TensorRule(
            name=DELTA + "A_log", axes=("delta_heads",), transform=_negative_exp, is_fp32=True
        ),
        "delta_dt_bias": TensorRule(name=DELTA + "dt_bias", axes=("delta_heads",), is_fp32=True),
        "delta_norm": TensorRule(name=DELTA + "norm.weight", axes=("delta_value",)),
        "delta_out": TensorRule(name=DELTA + "out_proj.weight", axes=("hidden", "delta_values")),
    }


class Qwen35MoeConfig(GatedDeltaConfig, SoftmaxExpertsConfig):
    intermediate_size: Count = 1  # no layer has a dense MLP
    num_experts: ExpertCount = Field(256, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count | None = 512


_PROJECTIONS: Mapping[str, TensorRule] = {
    "delta_qkv": TensorRule(name=DELTA + "in_proj_qkv.weight", axes=("delta_channels", "hidden")),
    "delta_z": TensorRule(name=DELTA + "in_proj_z.weight", axes=("delta_values", "hidden")),
    "delta_b": TensorRule(name=DELTA + "in_proj_b.weight", axes=("delta_heads", "hidden")),
    "delta_a": TensorRule(name=DELTA + "in_proj_a.weight", axes=("delta_heads", "hidden")),
}


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(GatedDeltaConfig, raw, file)
    mlps = (GatedMLP(inner_size=config.intermediate_size),) * config.num_hidden_layers
    return read_gated_delta(raw, file, config, mlps, _PROJECTIONS)


def read_moe(raw: Json, file: str) -> ModelSpec:
    # These families always divide the chosen experts' weights by their sum.
    config = parse(Qwen35MoeConfig, {**raw, "norm_topk_prob": True}, file)
    tensors = {**_PROJECTIONS, **EXPERT_TENSORS, **SHARED_TENSORS}
    return read_gated_delta(raw, file, config, config.mlps(file), tensors)


class Qwen3NextConfig(GatedDeltaConfig, SoftmaxExpertsConfig):
    num_experts: ExpertCount = Field(512, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count | None = 512
    norm_topk_prob: bool = True


def _regroup_by_kind(sizes: tuple[int, ...], rows_OH: Tensor) -> Tensor:
    """Regroup rows from key head by key head, with these sizes per kind, to kind by kind over all heads."""
    kinds = rows_OH.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])


def _next_tensors(config: Qwen3NextConfig) -> Mapping[str, TensorRule]:
    group = config.linear_num_value_heads // config.linear_num_key_heads
    key, values = config.linear_key_head_dim, group * config.linear_value_head_dim
    return {
        "delta_qkvz": TensorRule(
            name=DELTA + "in_proj_qkvz.weight",
            axes=("delta_qkvz", "hidden"),
            transform=Transform(_regroup_by_kind, ((key, key, values, values),)),
        ),
        "delta_ba": TensorRule(
            name=DELTA + "in_proj_ba.weight",
            axes=("delta_ba", "hidden"),
            transform=Transform(_regroup_by_kind, ((group, group),)),
        ),
    }


def read_next(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3NextConfig, raw, file)
    tensors = {**_next_tensors(config), **EXPERT_TENSORS, **SHARED_TENSORS}
    return read_gated_delta(raw, file, config, config.mlps(file), tensors)
