"""Checkpoints as the roofline sees them: the sizes of a target's spec, of a drafter's configuration.

Called by `plan/` and `bench/step.py`.
"""

from __future__ import annotations

from ..actors.targets.model.spec import PACKED_EXPERTS, LayerSpec, ModelSpec
from ..cluster.model_shape import ExpertShape, LayerShape, ModelShape
from ..drafter.compute.mxfp4 import BLOCK
from ..drafter.dflash.config import DrafterConfig

PACKED_BYTES = 0.5 + 1 / BLOCK  # of a weight in MXFP4: four bits, and a scale for a block


def target_shape(spec: ModelSpec, itemsize: int = 2) -> ModelShape:
    """Of a target whose weights, and K/V, take so many bytes each; packed experts stay packed."""
    weight_bytes = PACKED_BYTES if PACKED_EXPERTS in spec.expert_forms else itemsize
    layers = tuple(_layer(layer, weight_bytes) for layer in spec.layers)
    return ModelShape(layers=layers, hidden=spec.hidden_size, vocab=spec.vocab_size, itemsize=itemsize)


def drafter_shape(config: DrafterConfig, itemsize: int = 2) -> ModelShape:
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
        windows=tuple(layer.window for layer in config.layers),
    )


def _layer(layer: LayerSpec, weight_bytes: float) -> LayerShape:
    mixer, dense = layer.mixer, layer.dense
    return LayerShape(
        heads=mixer.num_heads,
        kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        v_head_dim=mixer.value_dim,
        window=mixer.window,
        inter=0 if dense is None else dense.inner_size,
        experts=_experts(layer, weight_bytes),
        gated=mixer.gate,
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
