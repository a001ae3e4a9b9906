"""Chooses the form of a model's experts that its checkpoint's quantization declares, and how ranks cut them.

    mxfp4     one packed tensor for all experts (gpt-oss)
    others    a matrix per expert in the format of its module, as dense ones

Where products take codes (`Scheme.packed_form`), a rank has whole groups of an expert's inner states.
"""

from __future__ import annotations

from dataclasses import replace

from ....drafter.compute.checkpoint.hf_config import Json, wrong
from ....drafter.compute.checkpoint.packed_codes import BLOCK
from ....drafter.compute.checkpoint.quantization.checkpoint_quantization import KEY, CheckpointQuantization
from ..model.mlp_spec import PACKED_EXPERTS, ParallelMlpSpec, RoutedMLP
from ..model.model_spec import LayerSpec, ModelSpec

_SIZES = ("moe_intermediate_size", "intermediate_size", "hidden_size")  # keys of config.json


def with_quantization(
    spec: ModelSpec, quantization: CheckpointQuantization | None, raw: Json, file: str
) -> ModelSpec:
    """Return the model as stored. Raises CheckpointError if MXFP4 has no packed form or partial blocks."""
    if quantization is None or quantization.packed_experts != "mxfp4":
        spec = _without(spec, PACKED_EXPERTS)
    if quantization is None:
        return spec
    spec = replace(spec, quantization=quantization)
    if quantization.packed_experts == "mxfp4":
        if PACKED_EXPERTS not in spec.expert_forms:
            wanted = "another one: experts in MXFP4 are served for gpt-oss alone"
            raise wrong(file, f"{KEY}.quant_method", quantization.method, wanted)
        _check_blocks(spec, raw, file)
        return _in_groups(spec.in_form(PACKED_EXPERTS), [BLOCK] * spec.num_layers)
    return _in_groups(
        spec, [_group_of_experts(spec, quantization, layer) for layer in range(spec.num_layers)]
    )


def _without(spec: ModelSpec, form: tuple[str, ...]) -> ModelSpec:
    return replace(spec, tensors={part: rule for part, rule in spec.tensors.items() if part not in form})


def _check_blocks(spec: ModelSpec, raw: Json, file: str) -> None:
    routed = [layer.routed for layer in spec.layers if layer.routed is not None]
    for size in sorted({spec.hidden_size, *(mlp.inner_size for mlp in routed)}):
        if size % BLOCK:
            key = next((key for key in _SIZES if raw.get(key) == size), _SIZES[0])
            raise wrong(file, key, size, f"a multiple of {BLOCK}, the block of packed weights")


def _group_of_experts(spec: ModelSpec, quantization: CheckpointQuantization, layer: int) -> int:
    """Return the inner states that share a scale in products of codes; 1 if any of them can be cut."""
    routed, rule = spec.layers[layer].routed, spec.tensors.get("expert_down")
    if routed is None or rule is None:
        return 1
    module = f"model.{rule.name.format(layer=layer, expert=0)}".removesuffix(".weight")
    form = quantization.packed_form(module)
    group = 1 if form is None or form.group is None else form.group
    return group if routed.inner_size % group == 0 else 1


def _in_groups(spec: ModelSpec, groups: list[int]) -> ModelSpec:
    """Return the model with experts cut between groups only; a layer for MTP as the last one."""
    layers = tuple(_layer_in_groups(*pair) for pair in zip(spec.layers, groups, strict=True))
    mtp = None if spec.mtp is None else replace(spec.mtp, layer=_layer_in_groups(spec.mtp.layer, groups[-1]))
    return replace(spec, layers=layers, mtp=mtp)


def _layer_in_groups(layer: LayerSpec, group: int) -> LayerSpec:
    match layer.mlp:
        case RoutedMLP():
            return replace(layer, mlp=replace(layer.mlp, inner_multiple=group))
        case ParallelMlpSpec():
            routed = replace(layer.mlp.routed, inner_multiple=group)
            return replace(layer, mlp=replace(layer.mlp, routed=routed))
        case _:
            return layer
