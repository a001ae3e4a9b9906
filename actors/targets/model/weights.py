"""A target's tensors, by the slices that one rank needs; nothing else of the files is read.

Shapes are checked against config.json from the files' headers before any weight is read. Names, slices and
transforms are the family's (`ModelSpec.tensors`). Called by `loading/rank.py`; consumed layer by layer by
`decoder.py`, so that plain weights are gone once a layer is packed.

Legend: H hidden, O outputs of a rank, I inner size of a rank, D head dim, U vocabulary rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError
from ....drafter.compute.tensors import TensorFolder, TensorSource
from .parallel import Sharding
from .spec import ModelSpec, TensorRule

# Where the language model's body and head may stand: alone, or as a part of a multimodal checkpoint.
_BODIES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("", "language_model.")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Query, key and value rows stand in this order; gate rows before up rows.

    Biases and norms are None where the family has none; biases of o and down are None but on rank 0.
    """

    attention_norm_H: Tensor
    attention_out_norm_H: Tensor | None
    mlp_norm_H: Tensor
    mlp_out_norm_H: Tensor | None
    qkv_OH: Tensor
    qkv_bias_O: Tensor | None
    o_HO: Tensor
    o_bias_H: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    gate_up_IH: Tensor
    gate_up_bias_I: Tensor | None
    down_HI: Tensor
    down_bias_H: Tensor | None


class TargetWeights:
    """A rank's view of a checkpoint.

    Args:
        source: a folder, whose files are opened and checked, or the tensors of `target_shapes` themselves.
        sharding: which slices are this rank's.
    """

    def __init__(
        self,
        source: Path | TensorSource,
        spec: ModelSpec,
        sharding: Sharding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.sharding = spec, sharding
        self._dtype, self._device = dtype, device
        self._tensors = open_checkpoint(source, spec) if isinstance(source, Path) else source
        self._prefixes = _prefixes(self._tensors.shapes)

    def layer(self, index: int) -> LayerWeights:
        """Read one block."""
        there = frozenset(self.spec.layer_parts(index))

        def joined(*parts: str) -> Tensor | None:
            found = [self._part(part, index) for part in parts if part in there]
            return torch.cat(found) if found else None

        def single(part: str) -> Tensor | None:
            rule = self.spec.tensors[part] if part in there else None
            if rule is None or (rule.first_rank and self.sharding.rank):
                return None
            return self._part(part, index)

        return LayerWeights(
            attention_norm_H=self._part("attention_norm", index),
            attention_out_norm_H=single("attention_out_norm"),
            mlp_norm_H=self._part("mlp_norm", index),
            mlp_out_norm_H=single("mlp_out_norm"),
            qkv_OH=torch.cat([self._part(part, index) for part in "qkv"]),
            qkv_bias_O=joined("q_bias", "k_bias", "v_bias"),
            o_HO=self._part("o", index),
            o_bias_H=single("o_bias"),
            q_norm_D=single("q_norm"),
            k_norm_D=single("k_norm"),
            gate_up_IH=torch.cat([self._part(part, index) for part in ("gate", "up")]),
            gate_up_bias_I=joined("gate_bias", "up_bias"),
            down_HI=self._part("down", index),
            down_bias_H=single("down_bias"),
        )

    def final_norm(self) -> Tensor:
        return self._part("final_norm")

    def embedding(self) -> Tensor:
        """[U, H]; token ids beyond the vocabulary are zero rows."""
        return self._vocab("embedding")

    def head(self) -> Tensor:
        """[U, H]; the embedding where they are tied."""
        return self.embedding() if self.spec.tied_head else self._vocab("head")

    def _vocab(self, part: str) -> Tensor:
        rows_UH = self._part(part)
        missing = self.sharding.vocab_rows - len(rows_UH)
        return torch.nn.functional.pad(rows_UH, (0, 0, 0, missing)) if missing else rows_UH

    def _part(self, part: str, layer: int = 0) -> Tensor:
        """This rank's slice, on the device and in the dtype to compute in."""
        rule = self.spec.tensors[part]
        tensor = self._slice(rule, layer).to(self._device)
        if part in _ROTATED:
            tensor = self.spec.layers[layer].mixer.rope.arranged(tensor)
        if rule.transform is not None:
            tensor = rule.transform(tensor)
            return tensor if tensor.dtype is torch.float32 else tensor.to(self._dtype)
        return tensor.to(self._dtype)

    def _slice(self, rule: TensorRule, layer: int) -> Tensor:
        name = _full_name(rule, layer, self._prefixes)
        for dim, axis in enumerate(rule.axes):
            mine = self.sharding.slice_of(axis, layer)
            if mine is not None and self._tensors.shapes[name][dim] != mine.stop - mine.start:
                return self._tensors.slice(name, mine, dim)
        return self._tensors.get(name)


_ROTATED = frozenset({"q", "k", "q_bias", "k_bias", "q_norm", "k_norm"})  # rows of heads that are rotated


def open_checkpoint(folder: Path, spec: ModelSpec) -> TensorFolder:
    """Open the files and check that every tensor is there in its shape, without reading one."""
    tensors = TensorFolder(folder)
    prefixes = _prefixes(tensors.shapes)
    for name, shape in target_shapes(spec, prefixes).items():
        tensors.check(name, shape)
    _refuse_unasked(tensors, spec, prefixes)
    return tensors


def _refuse_unasked(tensors: TensorFolder, spec: ModelSpec, prefixes: tuple[str, str]) -> None:
    """A bias or norm that is there though config.json says nothing of it would be left out in silence."""
    unasked = set(spec.tensors) - {"embedding", "final_norm", "head", *spec.layer_parts(0)}
    asked = {_full_name(spec.tensors[part], 0, prefixes) for part in spec.layer_parts(0)}
    for part in sorted(unasked):
        name = _full_name(spec.tensors[part], 0, prefixes)
        if name in tensors.shapes and name not in asked:
            raise CheckpointError(
                f"model: {tensors.folder} holds {name}, but config.json asks for none (attention_bias, "
                "mlp_bias). Take config.json and weights from one revision.",
                param="model",
            )


def target_shapes(
    spec: ModelSpec, prefixes: tuple[str, str] = (_BODIES[0], _HEADS[0])
) -> dict[str, tuple[int, ...]]:
    """Every tensor that a target must have.

    Args:
        prefixes: of body and head.
    """
    whole = ["embedding", "final_norm"] + ["head"] * (not spec.tied_head)
    parts = [(part, 0) for part in whole]
    parts += [(part, layer) for layer in range(spec.num_layers) for part in spec.layer_parts(layer)]
    rules = [(spec.tensors[part], layer) for part, layer in parts]
    return {
        _full_name(rule, layer, prefixes): tuple(spec.axis_size(axis, layer) for axis in rule.axes)
        for rule, layer in rules
    }


def _prefixes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    """Of body and head, as this checkpoint spells them."""
    body = next((at for at in _BODIES if f"{at}embed_tokens.weight" in shapes), _BODIES[0])
    head = next((at for at in _HEADS if f"{at}lm_head.weight" in shapes), _HEADS[0])
    return body, head


def _full_name(rule: TensorRule, layer: int, prefixes: tuple[str, str]) -> str:
    body, head = prefixes
    return (head if rule.beside_body else body) + rule.name.format(layer=layer)
