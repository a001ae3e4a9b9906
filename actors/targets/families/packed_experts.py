"""Chooses the form of a model's experts that its checkpoint's quantization declares, and keeps them packed.

    mxfp4                                            one packed tensor for all experts (gpt-oss)
    INT4 in groups of 32 (compressed-tensors)        a packed tensor per expert (Kimi K2)

`drafter/compute/checkpoint/packed_4bit.py` has both. Experts in other schemes are dequantized when read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....drafter.compute.checkpoint.hf_config import Json, wrong
from ....drafter.compute.checkpoint.packed_4bit import BLOCK, bytes_of_words
from ....drafter.compute.checkpoint.quantization.checkpoint_quantization import KEY, CheckpointQuantization
from ....drafter.compute.checkpoint.quantization.module_patterns import expressions_of
from ....drafter.compute.checkpoint.quantization.packed_integers import PackedIntegers
from ....drafter.compute.checkpoint.safetensors_reader import WORDS
from ..model.mlp_spec import PACKED_EXPERTS, ParallelMlpSpec, RoutedMLP
from ..model.model_spec import Axis, LayerSpec, ModelSpec, TensorRule

_PARTS = ("expert_gate", "expert_up", "expert_down")
_SIZES = ("moe_intermediate_size", "intermediate_size", "hidden_size")  # keys of config.json
_INT4 = PackedIntegers(4, BLOCK)


def with_quantization(
    spec: ModelSpec, quantization: CheckpointQuantization | None, raw: Json, file: str
) -> ModelSpec:
    """Return the model as stored. Raises CheckpointError without a packed form or with partial blocks."""
    if quantization is None or quantization.packed_experts != "mxfp4":
        spec = _without(spec, PACKED_EXPERTS)
    if quantization is None:
        return spec
    spec = replace(spec, quantization=quantization)
    if quantization.packed_experts == "mxfp4":
        if PACKED_EXPERTS not in spec.expert_forms:
            wanted = "another one: experts in MXFP4 are served for gpt-oss alone"
            raise wrong(file, f"{KEY}.quant_method", quantization.method, wanted)
        return _in_blocks(spec.in_form(PACKED_EXPERTS), raw, file)
    if _has_int4_experts(spec, quantization):
        return _in_blocks(replace(spec, **_int4_form(spec, quantization)), raw, file)
    return spec


def _without(spec: ModelSpec, form: tuple[str, ...]) -> ModelSpec:
    return replace(spec, tensors={part: rule for part, rule in spec.tensors.items() if part not in form})


def _has_int4_experts(spec: ModelSpec, quantization: CheckpointQuantization) -> bool:
    if not spec.tensors.keys() >= set(_PARTS):
        return False
    layers = [i for i, layer in enumerate(spec.layers) if layer.routed is not None]
    modules = (
        "model." + spec.tensors[part].name.format(layer=layer, expert=0).removesuffix(".weight")
        for layer in layers
        for part in _PARTS
    )
    return bool(layers) and all(quantization.scheme_of(module) == _INT4 for module in modules)


def _int4_form(spec: ModelSpec, quantization: CheckpointQuantization) -> Mapping[str, object]:
    tensors = dict(spec.tensors)
    for part in _PARTS:
        rule = tensors.pop(part)
        rows, inputs = rule.axes
        assert inputs in _PACKED_AXES, "weights are packed along their inputs"
        words, groups = _PACKED_AXES[inputs]
        tensors[f"{part}_packed"] = TensorRule(
            name=f"{rule.name}_packed", axes=(rows, words), transform=bytes_of_words, stored=WORDS
        )
        tensors[f"{part}_scale"] = TensorRule(name=f"{rule.name}_scale", axes=(rows, groups))
    kept = expressions_of("search", [r"\.experts\.\d+\."], quantization.file, KEY)
    as_stored = replace(quantization, packed=kept)
    return {"tensors": tensors, "quantization": as_stored}


_PACKED_AXES: Mapping[Axis, tuple[Axis, Axis]] = {
    "hidden": ("hidden_words", "hidden_blocks"),
    "expert_inner": ("expert_inner_words", "expert_inner_blocks"),
}


def _in_blocks(spec: ModelSpec, raw: Json, file: str) -> ModelSpec:
    """Return the model with experts that are cut between blocks only."""
    routed = [layer.routed for layer in spec.layers if layer.routed is not None]
    sizes = {spec.hidden_size, *(mlp.inner_size for mlp in routed)}
    for size in sorted(sizes):
        if size % BLOCK:
            key = next((key for key in _SIZES if raw.get(key) == size), _SIZES[0])
            raise wrong(file, key, size, f"a multiple of {BLOCK}, the block of packed weights")
    return replace(spec, layers=tuple(_layer_in_blocks(layer) for layer in spec.layers))


def _layer_in_blocks(layer: LayerSpec) -> LayerSpec:
    match layer.mlp:
        case RoutedMLP():
            return replace(layer, mlp=replace(layer.mlp, inner_multiple=BLOCK))
        case ParallelMlpSpec():
            routed = replace(layer.mlp.routed, inner_multiple=BLOCK)
            return replace(layer, mlp=replace(layer.mlp, routed=routed))
        case _:
            return layer
