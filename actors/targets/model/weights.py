"""Reads the slices of a target's tensors that one rank needs, and nothing else of the files.

Shapes are checked against config.json by the files' headers before any weight is read. Names, axes and
transforms come from the family (`ModelSpec.tensors`). `decoder.py` reads layer by layer, so that plain
weights are freed once a layer is packed.

Legend: H hidden, O outputs of a rank, D head dim, Q query heads of a rank, U vocabulary rows of a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError
from ....drafter.compute.checkpoint.dummy_weights import RandomTensors
from ....drafter.compute.checkpoint.loading.quantized_tensors import QuantizedFolder, open_folder
from ....drafter.compute.checkpoint.quantized_matrix import Code, JoinedRows, Matrix, join_rows
from ....drafter.compute.checkpoint.safetensors_reader import TensorFolder, TensorSource
from ....drafter.compute.memory.kv_cache import UNSCALED, KVScales
from .attention import TargetAttention
from .delta_net import DeltaNet, DeltaTensors, read_delta
from .mlp_weights import MlpTensors, ParallelMlpTensors, read_dense, read_routed
from .model_spec import MTP_PARTS, ModelSpec, TensorRule
from .tensor_parallel import Sharding

# Prefixes of the language model's body and head: alone, or as part of a multimodal checkpoint.
_BODIES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("", "language_model.")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block's tensors; query, key and value rows in this order. Those that the family lacks are None.

    The bias of o is zero except on rank 0. `q_norm` and `k_norm` are of one head, or of all this rank's heads
    (`TargetAttention.row_norm`). With latent attention `qkv_OH` makes the latents, and the queries or their
    bottleneck.
    """

    attention_norm_H: Tensor
    attention_out_norm_H: Tensor | None
    mlp_norm_H: Tensor
    mlp_out_norm_H: Tensor | None
    qkv_OH: Matrix | JoinedRows
    qkv_bias_O: Tensor | None
    attention_gate_OH: Tensor | None
    o_HO: Matrix
    o_bias_H: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks_Q: Tensor | None
    delta: DeltaTensors | None
    mlp: MlpTensors
    scalar_1: Tensor | None
    latent: LatentTensors | None


@dataclass(frozen=True, slots=True)
class LatentTensors:
    """Latent attention's tensors after the first product; `kv_up_UC`: each head's keys, then its values."""

    q_norm_K: Tensor | None
    q_up_OK: Tensor | None
    kv_norm_C: Tensor
    kv_up_UC: Tensor


class TargetWeights:
    """A rank's view of a checkpoint, cut by `sharding`.

    `source`: a folder, with files that are opened and checked, or tensors in memory (`target_shapes`).
    `kept_codes`: kinds of codes as which quantized matrices are read (`linear_of_codes` takes them).
    `has_fp8_kv`: K and V are stored in e4m3.
    """

    def __init__(
        self,
        source: Path | TensorSource,
        spec: ModelSpec,
        sharding: Sharding,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kept_codes: Collection[Code] = (),
        has_fp8_kv: bool = False,
    ) -> None:
        self.dtype, self.device, self._kept_codes = dtype, device, kept_codes
        self._has_fp8_kv = has_fp8_kv
        self._tensors = open_checkpoint(source, spec, dtype) if isinstance(source, Path) else source
        self._prefixes = _prefixes(self._tensors.shapes)
        self.spec, self.sharding = _in_stored_form(spec, self._tensors.shapes, self._prefixes), sharding

    def layer(self, index: int) -> LayerWeights:
        parts, is_delta = _LayerParts(self, index), isinstance(self.spec.layers[index].mixer, DeltaNet)
        return LayerWeights(
            attention_norm_H=parts.required("attention_norm"),
            attention_out_norm_H=parts.optional("attention_out_norm"),
            mlp_norm_H=parts.required("mlp_norm"),
            mlp_out_norm_H=parts.optional("mlp_out_norm"),
            qkv_OH=join_rows([parts.matrix(part) for part in self.spec.qkv_parts(index)], self.dtype),
            qkv_bias_O=parts.joined(*(f"{part}_bias" for part in self.spec.qkv_parts(index))),
            attention_gate_OH=parts.optional("attention_gate"),
            o_HO=parts.matrix("delta_out" if is_delta else "o"),
            o_bias_H=parts.optional("o_bias"),
            q_norm=parts.optional("q_norm"),
            k_norm=parts.optional("k_norm"),
            sinks_Q=parts.optional("sinks"),
            delta=read_delta(parts.required) if is_delta else None,
            mlp=self._mlp(parts, index),
            scalar_1=parts.optional("scalar"),
            latent=_read_latent(parts),
        )

    def _mlp(self, parts: _LayerParts, index: int) -> MlpTensors:
        layer, sharding = self.spec.layers[index], self.sharding
        if layer.routed is None:
            return read_dense(parts)
        # If ranks have parts of an expert, rank 0 adds its bias, the others add zeros by the same kernels.
        adds_down_bias = sharding.rank == 0 or not sharding.splits_experts(index)
        routed = read_routed(
            parts,
            layer.routed,
            self.spec.expert_forms[0],
            sharding.experts(index),
            adds_down_bias=adds_down_bias,
            eps=self.spec.rms_norm_eps,
        )
        if layer.dense is None:
            return routed
        norms = (parts.required(f"{name}_norm") for name in ("dense_out", "routed", "routed_out"))
        dense_out_norm_H, routed_norm_H, routed_out_norm_H = norms
        return ParallelMlpTensors(
            read_dense(parts), dense_out_norm_H, routed, routed_norm_H, routed_out_norm_H
        )

    def final_norm(self) -> Tensor:
        return self.part("final_norm")

    def vocabulary(self, *, as_codes: bool) -> tuple[Matrix, Matrix]:
        """Return the embedding and the head [U, H], with zero rows for ids beyond the vocabulary.

        Both are the same object if they are tied, and where `as_codes`, codes as layers' matrices.
        """
        is_whole = self.sharding.world_size == 1

        def read(part: str) -> Matrix:
            return self.matrix(part, layer=0) if as_codes and is_whole else self._vocab(part)

        embedding_UH = read("embedding")
        return embedding_UH, embedding_UH if self.spec.tied_head else read("head")

    def embedding(self) -> Tensor:
        return self._vocab("embedding")

    def head(self) -> Tensor:
        return self.embedding() if self.spec.tied_head else self._vocab("head")

    def _vocab(self, part: str) -> Tensor:
        rows_UH = self.part(part)
        missing = self.sharding.vocab_rows - len(rows_UH)
        return torch.nn.functional.pad(rows_UH, (0, 0, 0, missing)) if missing else rows_UH

    def kv_scales(self) -> list[KVScales]:
        """Return the scales of K and V in e4m3 of each layer with attention; 1 where none are stored."""
        modules, tensors = _attention_modules(self.spec, self._prefixes), self._tensors
        if not self._has_fp8_kv or not isinstance(tensors, QuantizedFolder):
            return [UNSCALED] * len(modules)
        return [UNSCALED if module is None else tensors.kv_scales(module) for module in modules]

    def part(self, part: str, layer: int = 0, expert: int = 0) -> Tensor:
        """Return this rank's slice of a part (`ModelSpec.tensors`) on the device, in the computing dtype."""
        rule = self.spec.tensors[part]
        if rule.constant is not None:
            sizes = [self.spec.axis_size(axis, layer) for axis in rule.axes]
            return torch.full(sizes, rule.constant, device=self.device)
        tensor = self._slice(rule, layer, expert).to(self.device)
        if part in _ROTATED:
            tensor = _arrange_for_rope(tensor, part, self.spec.attention(layer))
        is_fp32 = rule.is_fp32 or (self.spec.fp32_norms and part.endswith("norm"))
        if is_fp32:
            tensor = tensor.to(torch.float32)
        if rule.transform is not None:
            tensor = rule.transform(tensor)
        if is_fp32 or tensor.dtype is torch.uint8:  # packed weights
            return tensor
        return tensor.to(self.dtype)

    def matrix(self, part: str, layer: int, expert: int = 0) -> Matrix:
        """Return this rank's slice of a matrix, as codes where they are kept and no group is cut."""
        rule, tensors = self.spec.tensors[part], self._tensors
        has_codes = isinstance(tensors, QuantizedFolder | RandomTensors)
        if not self._kept_codes or not has_codes or rule.transform is not None:
            return self.part(part, layer, expert)
        name = _full_name(rule, layer, self._prefixes, expert)
        parts, dim = self._cut(rule, layer, name)
        found = tensors.codes(name, *parts, dim=dim) if len(parts) <= 1 else None
        found = None if found is None else found.of_kinds(self._kept_codes)
        if found is None:
            return self.part(part, layer, expert)
        if part in _ROTATED:
            numbers_O1 = torch.arange(len(found)).unsqueeze(1)
            found = found.rows(_arrange_for_rope(numbers_O1, part, self.spec.attention(layer)).squeeze(1))
        return found.to(self.device)

    def _slice(self, rule: TensorRule, layer: int, expert: int) -> Tensor:
        name = _full_name(rule, layer, self._prefixes, expert)
        parts, dim = self._cut(rule, layer, name)
        if not parts:
            return self._tensors.get(name)
        slices = [self._tensors.slice(name, each, dim) for each in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)

    def _cut(self, rule: TensorRule, layer: int, name: str) -> tuple[Sequence[slice], int]:
        """Return this rank's parts of a tensor along a dimension; no parts if it has the whole tensor."""
        for dim, axis in enumerate(rule.axes):
            parts = self.sharding.slices_of(axis, layer)
            if parts and self._tensors.shapes[name][dim] != sum(each.stop - each.start for each in parts):
                return parts, dim
        return (), 0


class _LayerParts:
    __slots__ = ("_layer", "_present", "_weights")

    def __init__(self, weights: TargetWeights, layer: int) -> None:
        self._weights, self._layer = weights, layer
        self._present = frozenset(weights.spec.layer_parts(layer))

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    def required(self, part: str) -> Tensor:
        return self._weights.part(part, self._layer)

    def matrix(self, part: str) -> Matrix:
        return self._weights.matrix(part, self._layer)

    def optional(self, part: str) -> Tensor | None:
        if part not in self._present:
            return None
        found = self.required(part)
        is_of_rank_0 = self._weights.spec.tensors[part].first_rank
        return torch.zeros_like(found) if is_of_rank_0 and self._weights.sharding.rank > 0 else found

    def joined(self, *parts: str) -> Tensor | None:
        found = [self.required(part) for part in parts if part in self._present]
        return torch.cat(found) if found else None

    def of_each_expert(self, part: str, *, as_codes: bool) -> Iterator[Matrix]:
        experts = self._weights.sharding.experts(self._layer)
        read = self._weights.matrix if as_codes else self._weights.part
        return (read(part, self._layer, expert) for expert in range(experts.start, experts.stop))


def _read_latent(parts: _LayerParts) -> LatentTensors | None:
    kv_norm_C, kv_up_UC = parts.optional("kv_down_norm"), parts.optional("kv_up")
    if kv_norm_C is None or kv_up_UC is None:
        return None
    return LatentTensors(parts.optional("q_down_norm"), parts.optional("q_up"), kv_norm_C, kv_up_UC)


# Tensors whose rows are heads that rope rotates: all of their rows, or with latent attention the last ones.
_ROTATED = frozenset({"q", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_up", "kv_down"})


def _arrange_for_rope(rows: Tensor, part: str, mixer: TargetAttention) -> Tensor:
    if mixer.rope is None:
        return rows
    if mixer.latent is None:
        return mixer.rope.arranged(rows)
    heads = rows.unflatten(0, (-1, mixer.head_dim if part == "kv_down" else mixer.q_dim))
    passing, rotated = heads.split([heads.shape[1] - mixer.rope.head_dim, mixer.rope.head_dim], dim=1)
    return torch.cat((passing, mixer.rope.arranged(rotated.flatten(0, 1)).view_as(rotated)), 1).flatten(0, 1)


def open_checkpoint(
    folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32
) -> TensorFolder | QuantizedFolder:
    """Open the files and check that every tensor is there with its shape; `dtype` is the computing dtype."""
    tensors = open_folder(folder, spec.quantization, dtype)
    prefixes = _prefixes(tensors.shapes)
    spec = _in_stored_form(spec, tensors.shapes, prefixes)
    read = _rules_by_name(spec, prefixes)
    for name, (rule, shape) in read.items():
        tensors.check(name, shape, rule.stored)
    tensors.refuse_stray_scales(read)
    _refuse_unexpected(tensors, spec, prefixes)
    return tensors


def unused_scales(
    tensors: TensorFolder | QuantizedFolder, with_fp8_kv: Sequence[ModelSpec] = ()
) -> tuple[str, ...]:
    """Return sentences about a checkpoint's scales that are not applied.

    `with_fp8_kv`: its models with K and V in e4m3. Raises CheckpointError as `find_kv_scales`.
    """
    if not isinstance(tensors, QuantizedFolder):
        return ()
    prefixes, used = _prefixes(tensors.shapes), set[str]()
    for spec in with_fp8_kv:
        for module in _attention_modules(spec, prefixes):
            used.update((module and tensors.kv_scale_names(module)) or ())
    return tensors.notes(used)


def _attention_modules(spec: ModelSpec, prefixes: tuple[str, str]) -> list[str | None]:
    """Return the module of each layer with attention; None with latents, for which no scales are defined."""
    mixers = [(i, layer.mixer) for i, layer in enumerate(spec.layers)]
    return [
        None if mixer.latent else _full_name(spec.tensors["k"], layer, prefixes).rsplit(".", 2)[0]
        for layer, mixer in mixers
        if isinstance(mixer, TargetAttention)
    ]


def _refuse_unexpected(
    tensors: TensorFolder | QuantizedFolder, spec: ModelSpec, prefixes: tuple[str, str]
) -> None:
    """Raise CheckpointError for a bias or norm that would be ignored, unless it is a bias of zeros."""
    stored = {part for part, rule in spec.tensors.items() if rule.constant is None}
    unexpected = stored - {"embedding", "final_norm", "head", *MTP_PARTS, *spec.layer_parts(0)}
    expected = {_full_name(spec.tensors[part], 0, prefixes) for part in spec.layer_parts(0)}
    for part in sorted(unexpected):
        name = _full_name(spec.tensors[part], 0, prefixes)
        if name in tensors.shapes and name not in expected and not _is_zero(tensors, spec, part, prefixes):
            raise CheckpointError(
                f"model: {tensors.folder} holds {name}, but config.json declares none (attention_bias, "
                "mlp_bias). Take config.json and weights from one revision.",
                param="model",
            )


def _is_zero(
    tensors: TensorFolder | QuantizedFolder, spec: ModelSpec, part: str, prefixes: tuple[str, str]
) -> bool:
    layers = [layer for layer in range(spec.num_layers) if part not in spec.layer_parts(layer)]
    names = [_full_name(spec.tensors[part], layer, prefixes) for layer in layers]
    return part.endswith("bias") and not any(
        tensors.get(name).any() for name in names if name in tensors.shapes
    )


def target_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a target must have; of several forms of experts the usual one."""
    prefixes = (_BODIES[0], _HEADS[0])
    return {name: shape for name, (_, shape) in _rules_by_name(spec, prefixes).items()}


def _rules_by_name(
    spec: ModelSpec, prefixes: tuple[str, str]
) -> dict[str, tuple[TensorRule, tuple[int, ...]]]:
    """Return each stored tensor's rule and shape by its full name; tensors of experts are one by one."""
    global_parts = ["embedding", "final_norm"] + ["head"] * (not spec.tied_head)
    parts = [(part, 0) for part in global_parts]
    if beside := [part for part in MTP_PARTS if part in spec.tensors]:
        parts += [(part, layer) for part in ("final_norm", *beside) for layer in range(spec.num_layers)]
    parts += [(part, layer) for layer in range(spec.num_layers) for part in spec.layer_parts(layer)]
    rules = [(spec.tensors[part], layer) for part, layer in parts]
    return {
        _full_name(rule, layer, prefixes, expert): (
            rule,
            tuple(spec.axis_size(axis, layer) for axis in rule.axes),
        )
        for rule, layer in rules
        if rule.constant is None
        for expert in range(spec.axis_size("expert", layer) if "{expert}" in rule.name else 1)
    }


def _in_stored_form(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], prefixes: tuple[str, str]
) -> ModelSpec:
    """Return the model with experts in the form that the checkpoint has; in the usual form if it has none."""
    layer = next((i for i, layer in enumerate(spec.layers) if layer.routed is not None), None)
    if layer is None:
        return spec
    forms = spec.expert_forms
    present = (form for form in forms if _full_name(spec.tensors[form[0]], layer, prefixes) in shapes)
    return spec.in_form(next(present, forms[0]))


def _prefixes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    body = next((prefix for prefix in _BODIES if f"{prefix}embed_tokens.weight" in shapes), _BODIES[0])
    head = next((prefix for prefix in _HEADS if f"{prefix}lm_head.weight" in shapes), _HEADS[0])
    return body, head


def _full_name(rule: TensorRule, layer: int, prefixes: tuple[str, str], expert: int = 0) -> str:
    body, head = prefixes
    return (head if rule.is_beside_body else body) + rule.name.format(layer=layer, expert=expert)
