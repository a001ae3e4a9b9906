"""What an architecture's definition consists of, and parts that several definitions share.

A definition is the only place that knows an architecture: the keys of config.json from the file's metadata,
and for each part of the file the name in the Hugging Face checkpoint and the rule that undoes what the
converter to GGUF did to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from .....cluster.errors import CheckpointError, brief_name
from .gguf_file import GgufFile
from .header import TensorInfo
from .metadata_keys import MetadataKeys
from .tensor_views import ComputedTensor, RowOrder, StoredRows, TensorView, values

Config = dict[str, Any]  # Any: JSON values
Views = Mapping[str, TensorView]
# Returns the tensors that a part of the file becomes; the name is that of Hugging Face, with its layer.
Rule = Callable[[MetadataKeys, TensorInfo, str], Views]

FREQUENCIES = "rope_freqs.weight"
LAYER = "model.layers.{layer}."  # before the names of a layer's parts


def whole(_: MetadataKeys, info: TensorInfo, name: str) -> Views:
    return {name: StoredRows(info)}


def nothing(_keys: MetadataKeys, _info: TensorInfo, _name: str) -> Views:
    """Return no tensor: the part is in config.json, or in the tensors of another part."""
    return {}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the file: its name in the Hugging Face checkpoint, and how it becomes that tensor.

    `stored` is the inverse of `rule`, given config.json; only drafters are written.
    """

    name: str = ""
    rule: Rule = whole
    stored: Callable[[Tensor, Config], Tensor] = lambda tensor, _: tensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        class_name, model_type: of the Hugging Face model.
        config: keys of config.json beside those that all architectures have.
        layer: parts of a layer, without "blk.N."; one with neither ".weight" nor ".bias" stands for both.
        others: parts outside of layers, by their whole names.
        mtp: names before those of layers for multi-token prediction, which follow the others, and the parts
            that only they have; both have a place for the layer's number.
        before_layer: what names of a layer's parts begin with, with a place for the layer's number.
    """

    class_name: str
    model_type: str
    config: Callable[[MetadataKeys], Config]
    layer: Mapping[str, Part]
    others: Mapping[str, Part] = field(default_factory=dict[str, Part])
    mtp: tuple[str, Mapping[str, Part]] = (LAYER, {})
    before_layer: str = LAYER


def rotary_pairs(heads: str) -> Rule:
    """Return a rule for rows of heads whose rotated pairs are neighbors in GGUF, but half a head apart here.

    `heads` is the key with their number.
    """

    def rule(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
        return {name: StoredRows(info, order=_halves(keys.count(heads)))}

    return rule


def paired_rows(rows: Tensor, num_heads: int) -> Tensor:
    """Return rows of heads as `rotary_pairs` reads them."""
    paired = torch.empty_like(rows)
    paired[_halves(num_heads)(len(rows))] = rows
    return paired


def _halves(num_heads: int) -> RowOrder:
    def order(num_rows: int) -> Tensor:
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()

    return order


def one_less(_: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return the w of a norm that multiplies by 1 + w."""
    return {name: ComputedTensor(info.shape, lambda file: values(file, info.name) - 1)}


def as_row(_: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return a vector as a matrix of one row."""
    return {name: ComputedTensor((1, prod(info.shape)), lambda file: values(file, info.name).view(1, -1))}


def experts(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return a matrix per expert of a tensor [E, O, I]; `name` has a place for the expert's number."""
    require_dimensions(keys, info, 3)
    num_experts, rows = info.shape[:2]
    return {
        name.format(expert=expert): StoredRows(info, expert * rows, rows) for expert in range(num_experts)
    }


def experts_gate_up(keys: MetadataKeys, info: TensorInfo, name: str) -> Views:
    """Return two matrices per expert of a tensor with each expert's gate rows before its up rows.

    `name` has a place for the expert's number, and one for "gate" or "up".
    """
    require_dimensions(keys, info, 3)
    num_experts, rows = info.shape[:2]
    inner = rows // 2
    return {
        name.format(expert=expert, kind=kind): StoredRows(info, expert * rows + half * inner, inner)
        for expert in range(num_experts)
        for half, kind in enumerate(("gate", "up"))
    }


ATTENTION: Mapping[str, Part] = {
    "attn_norm": Part("input_layernorm"),
    "attn_q": Part("self_attn.q_proj"),
    "attn_k": Part("self_attn.k_proj"),
    "attn_v": Part("self_attn.v_proj"),
    "attn_output": Part("self_attn.o_proj"),
}
HEAD_NORMS: Mapping[str, Part] = {
    "attn_q_norm": Part("self_attn.q_norm"),
    "attn_k_norm": Part("self_attn.k_norm"),
}
DENSE: Mapping[str, Part] = {
    "ffn_gate": Part("mlp.gate_proj"),
    "ffn_up": Part("mlp.up_proj"),
    "ffn_down": Part("mlp.down_proj"),
}
PLAIN: Mapping[str, Part] = {**ATTENTION, **DENSE, "ffn_norm": Part("post_attention_layernorm")}


def expert_parts(gate: str, up: str, down: str) -> Mapping[str, Part]:
    """Return the parts of routed experts, given the names of an expert's matrices."""
    return {
        "ffn_gate_exps": Part(gate, experts),
        "ffn_up_exps": Part(up, experts),
        "ffn_down_exps": Part(down, experts),
    }


MLP_EXPERTS: Mapping[str, Part] = {
    **expert_parts(*(f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down"))),
    "ffn_gate_up_exps": Part("mlp.experts.{expert}.{kind}_proj", experts_gate_up),
}


def num_mtp_layers(keys: MetadataKeys) -> int:
    """Return the layers for multi-token prediction, which `block_count` counts, too."""
    return keys.integer("nextn_predict_layers", 0)


def num_layers_of(keys: MetadataKeys) -> int:
    """Return the model's own layers. Raises CheckpointError if there are fewer tensors than layers."""
    count, num_tensors = keys.count("block_count"), len(keys.file.tensors)
    if count > num_tensors:
        raise keys.wrong("block_count", count, f"at most the number of tensors ({num_tensors})")
    if (found := count - num_mtp_layers(keys)) < 1:
        raise keys.wrong("nextn_predict_layers", num_mtp_layers(keys), "less than block_count")
    return found


def num_experts_of(keys: MetadataKeys) -> int:
    """Return the experts of a layer. Raises CheckpointError if tensors have another number of them."""
    count = keys.count("expert_count")
    for name, info in keys.file.tensors.items():
        if name.endswith("_exps.weight") and info.shape[:-2] != (count,):
            raise keys.wrong(
                "expert_count", count, f"the first size of {brief_name(name)}, {list(info.shape)}"
            )
    return count


def partner(keys: MetadataKeys, info: TensorInfo, part: str, other: str) -> TensorInfo:
    """Return the tensor that belongs to `info`, whose name has `other` in place of `part`.

    Raises CheckpointError if there is none, or if it has another number of dimensions.
    """
    name = info.name.replace(part, other)
    found = keys.file.tensors.get(name)
    if found is None or len(found.shape) != len(info.shape):
        of = "no such tensor" if found is None else f"one of shape {list(found.shape)}"
        raise CheckpointError(
            f"{keys.where}: {brief_name(info.name)} of shape {list(info.shape)} needs {brief_name(name)}, but"
            f" the file has {of}; download it again."
        )
    return found


def require_dimensions(keys: MetadataKeys, info: TensorInfo, count: int) -> None:
    if len(info.shape) != count:
        raise CheckpointError(
            f"{keys.where}: {brief_name(info.name)} has shape {list(info.shape)}; it must have {count} sizes."
            " Download the file again."
        )


def has_part(file: GgufFile, part: str) -> bool:
    """Return whether some layer has the part, such as "attn_q.bias"."""
    return any(name.startswith("blk.") and name.split(".", 2)[-1] == part for name in file.tensors)


def layers_with(file: GgufFile, tensor: str, num_layers: int) -> list[int]:
    return [layer for layer in range(num_layers) if f"blk.{layer}.{tensor}" in file.tensors]


def attention_config(keys: MetadataKeys) -> Config:
    """Return the sizes of attention, and of a dense MLP if the file states it."""
    heads = keys.count("attention.head_count")
    size = keys.count("attention.key_length", keys.count("embedding_length") // heads)
    if (of_values := keys.count("attention.value_length", size)) != size:
        raise keys.wrong("attention.value_length", of_values, f"{size}, as attention.key_length")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": size,
        **(
            {"intermediate_size": keys.count("feed_forward_length")}
            if keys.has("feed_forward_length")
            else {}
        ),
    }
