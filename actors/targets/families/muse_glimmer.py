"""Muse-Glimmer, text: gated attention, sandwich norms; every fourth layer is full and has no rotation.

    x = rms(E[id]);  x += post(o(attention(norm x) * sigmoid(g norm x)))
    x += post(down(silu(gate norm x) * up norm x))
    logits = cap tanh(multiplier head(norm x) / cap)

Norms of a block store w of 1 + w, the final norm w. Queries and keys are normed per head without a weight,
and queries are then multiplied by a factor: here these are head norms with constant weights.
Sources: transformers' modeling_muse_glimmer.py, with the defaults of its configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ....drafter.compute.checkpoint.hf_config import Count, Json, parse, wrong
from ....drafter.compute.layers.rope import RopeConfig
from ..model.mlp_spec import GatedMLP
from ..model.model_spec import LayerSpec, ModelSpec, TensorRule
from .gemma3 import SANDWICH_NORMS
from .shared.llama_like import TENSORS, PlainConfig, model_of

_FULL_INTERVAL = 4  # counted from the last layer: one full layer, three sliding ones

Positive = Annotated[float, Field(gt=0, description="a positive number")]


class MuseGlimmerConfig(PlainConfig):
    rms_norm_eps: float = 1e-5
    hidden_activation: Literal["silu"] = "silu"
    sliding_window: Count | None = 2048
    attention_bias: bool = False
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    post_norm_eps: float = 1e-8
    final_logit_softcapping: Positive = 20.0
    layer_rope_theta: tuple[float, ...] | None = None

    def is_full(self, layer: int) -> bool:
        return (self.num_hidden_layers - 1 - layer) % _FULL_INTERVAL == 0

    def rotates(self, file: str, theta: float) -> tuple[bool, ...]:
        """Return whether each layer rotates; all that do have the same base."""
        count = self.num_hidden_layers
        thetas = self.layer_rope_theta
        if thetas is None:
            return tuple(not self.is_full(layer) for layer in range(count))
        if len(thetas) != count or set(thetas) - {0, theta}:
            raise wrong(
                file,
                "layer_rope_theta",
                thetas,
                f"one entry for each of num_hidden_layers ({count}): 0, or rope_theta ({theta:g})",
            )
        return tuple(theta != 0 for theta in thetas)


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(MuseGlimmerConfig, raw, file)
    count, size = config.num_hidden_layers, config.head_size(file)
    derived = tuple(
        "full_attention" if config.is_full(layer) else "sliding_attention" for layer in range(count)
    )
    rope, bias = RopeConfig.read(raw, size, file), config.attention_bias
    attention = replace(
        config.plain_attention(file, rope, size), qk_norm=True, gate=True, bias=bias, out_bias=bias
    )
    layers = [
        LayerSpec(
            mixer=replace(attention, rope=rope if rotates else None, window=config.window_of(kind, file)),
            mlp=GatedMLP(inner_size=config.intermediate_size),
            sandwich=True,
        )
        for kind, rotates in zip(config.types(file, derived), config.rotates(file, rope.theta), strict=True)
    ]
    tensors = {
        **TENSORS,
        **SANDWICH_NORMS,
        "q_norm": TensorRule(name="", axes=("head",), constant=config.qk_scale_factor),
        "k_norm": TensorRule(name="", axes=("head",), constant=1.0),
    }
    return replace(
        model_of(config, tuple(layers), tensors),
        out_norm_eps=config.post_norm_eps,
        embed_norm=True,
        logit_multiplier=config.output_multiplier,
        logit_cap=config.final_logit_softcapping,
        fp32_norms=True,
    )
