"""`quantization_config` of checkpoints with packed weights: FP8 in blocks, INT4 in groups of 32.

FP8: each block of a matrix has a scale (`fp8_block_reader.py`). `activation_scheme` is ignored: matrices are
dequantized and multiplied in the dtype of the model, so outputs are at least as exact as with quantized
activations, but not the same bits.

INT4: experts in groups of 32 (`drafter/compute/checkpoint/packed_4bit.py`). Of what compressed-tensors
supports, only the scheme of Kimi K2 is read. The list of modules that are not packed is ignored: it names all
but routed experts, as do the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from .....drafter.compute.checkpoint.hf_config import Count, HfConfig, Off
from .....drafter.compute.checkpoint.packed_4bit import BLOCK, bytes_of_words
from .....drafter.compute.checkpoint.safetensors_reader import WORDS
from ...model.model_spec import Axis, TensorRule


def _check_two_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != 2:
        raise ValueError("must be a list of two positive integers: rows and columns of a block")
    return sizes


class Fp8Weights(HfConfig):
    """FP8 in blocks; any other `quant_method` is refused."""

    quant_method: Literal["fp8"]
    fmt: Literal["float8_e4m3fn", "e4m3"] = "e4m3"
    weight_block_size: Annotated[tuple[Count, ...], AfterValidator(_check_two_sizes)]

    @property
    def block(self) -> tuple[int, int]:
        rows, columns = self.weight_block_size
        return rows, columns


class _Weights(HfConfig):
    """Symmetric 4-bit codes, with a scale for each group along the inputs."""

    num_bits: Literal[4]
    type: Literal["int"] = "int"
    strategy: Literal["group"] = "group"
    group_size: Literal[32]
    symmetric: Literal[True] = True
    actorder: Off = False


class _Group(HfConfig):
    weights: _Weights
    input_activations: Off = False
    output_activations: Off = False


def _check_one_group(groups: Any) -> Any:  # Any: JSON values
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError("must be one group: weights that are packed in several ways are not served")
    return groups


class Int4Weights(HfConfig):
    """INT4 in groups; any other `quant_method` or format is refused."""

    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized"]
    config_groups: Annotated[dict[str, _Group], AfterValidator(_check_one_group)]
    kv_cache_scheme: Off = False


def int4_tensors(tensors: Mapping[str, TensorRule]) -> Mapping[str, TensorRule]:
    """Return a family's tensors with those of single experts replaced by packed ones."""
    packed = dict(tensors)
    for part in ("expert_gate", "expert_up", "expert_down"):
        rule = packed.pop(part)
        rows, inputs = rule.axes
        assert inputs in _PACKED_AXES, "weights are packed along their inputs"
        words, groups = _PACKED_AXES[inputs]
        packed[f"{part}_packed"] = TensorRule(
            name=f"{rule.name}_packed", axes=(rows, words), transform=bytes_of_words, stored=WORDS
        )
        packed[f"{part}_scale"] = TensorRule(name=f"{rule.name}_scale", axes=(rows, groups))
    return packed


INT4_GROUP = BLOCK
_PACKED_AXES: Mapping[Axis, tuple[Axis, Axis]] = {
    "hidden": ("hidden_words", "hidden_blocks"),
    "expert_inner": ("expert_inner_words", "expert_inner_blocks"),
}
