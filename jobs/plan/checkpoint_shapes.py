"""Shapes of targets and drafters for the roofline, from their specifications.

Used by `plan/` and `bench/step_cost.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...actors.targets.model.attention import TargetAttention
from ...actors.targets.model.mlp_spec import INT4_EXPERTS, PACKED_EXPERTS
from ...actors.targets.model.model_spec import DeltaNet, LayerSpec, ModelSpec
from ...cluster.config import Quantization
from ...cluster.hardware.model_shape import ExpertShape, LatentShape, LayerShape, ModelShape
from ...drafter.compute.quantization.packed_4bit import BLOCK
from ...drafter.dflash.config import DrafterConfig

_BYTES: Mapping[Quantization | None, int] = {"fp8": 1}  # per weight
# Bytes of a packed weight: four bits, and a scale per block of one byte (MXFP4) or two bytes (INT4).
PACKED_BYTES, INT4_BYTES = 0.5 + 1 / BLOCK, 0.5 + 2 / BLOCK


def target_shape(spec: ModelSpec, itemsize: int = 2, quantization: Quantization | None = None) -> ModelShape:
    """Return a target's shape. Packed experts stay packed; `quantization` is that of dense products."""
    kept = {PACKED_EXPERTS: PACKED_BYTES, INT4_EXPERTS: INT4_BYTES}
    weight_bytes = next((size for form, size in kept.items() if form in spec.expert_forms), itemsize)
    layers = tuple(_layer(layer, weight_bytes) for layer in spec.layers)
    return ModelShape(
        layers=layers,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        itemsize=itemsize,
        product_itemsize=_BYTES.get(quantization),
    )


def drafter_shape(
    config: DrafterConfig, itemsize: int = 2, quantization: Quantization | None = None
) -> ModelShape:
    return ModelShape.dense(
        layers=config.num_layers,
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.draft_vocab_size,
        taps=config.num_taps,
        itemsize=itemsize,
        product_itemsize=_BYTES.get(quantization),
        windows=tuple(layer.window for layer in config.layers),
    )


def _layer(layer: LayerSpec, weight_bytes: float) -> LayerShape:
    mixer, dense = layer.mixer, layer.dense
    if isinstance(mixer, DeltaNet):
        inter = 0 if dense is None else dense.inner_size
        return LayerShape(state=mixer.geometry, inter=inter, experts=_experts(layer, weight_bytes))
    return LayerShape(
        heads=mixer.num_heads,
        kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        v_head_dim=mixer.value_dim,
        window=mixer.window,
        inter=0 if dense is None else dense.inner_size,
        experts=_experts(layer, weight_bytes),
        gated=mixer.gate,
        latent=_latent(mixer),
    )


def _latent(mixer: TargetAttention) -> LatentShape | None:
    if (latent := mixer.latent) is None:
        return None
    return LatentShape(
        q_rank=latent.q_rank,
        nope_dim=latent.nope_dim,
        rope_dim=mixer.head_dim - mixer.value_dim,
        v_dim=latent.v_dim,
        rank=mixer.value_dim,
    )


def _experts(layer: LayerSpec, weight_bytes: float) -> ExpertShape | None:
    if (routed := layer.routed) is None:
        return None
    return ExpertShape(
        count=routed.router.num_experts,
        chosen=routed.router.top_k,
        inter=routed.inner_size,
        held=routed.router.num_experts,
        shared_inter=0 if routed.shared is None else routed.shared.inner_size,
        weight_bytes=weight_bytes,
        inner_multiple=routed.inner_multiple,
    )
