"""`quantization_config` of checkpoints whose experts are INT4 in groups of 32 (`drafter/compute/int4.py`).

compressed-tensors lets a file say much more: only what Kimi K2 says is read, and all else is refused. Its
list of modules that are not packed says no more than tensors' names: here that is all but routed experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from ....drafter.compute.config_json import HfConfig, Off
from ....drafter.compute.int4 import bytes_of_words
from ....drafter.compute.packed import BLOCK
from ....drafter.compute.tensors import WORDS
from ..model.spec import Axis, TensorRule


class _Weights(HfConfig):
    """Symmetric codes of four bits, a scale for each group along the inputs."""

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


def _one_group(groups: Any) -> Any:  # Any: JSON values
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError("must be one group: weights that are packed in several ways are not served")
    return groups


class Int4Weights(HfConfig):
    """See the module's text; any other `quant_method` or format is refused."""

    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized"]
    config_groups: Annotated[dict[str, _Group], AfterValidator(_one_group)]
    kv_cache_scheme: Off = False


def int4_tensors(tensors: Mapping[str, TensorRule]) -> Mapping[str, TensorRule]:
    """A family's tensors with those of its experts, one by one, packed."""
    found = dict(tensors)
    for part in ("expert_gate", "expert_up", "expert_down"):
        rule = found.pop(part)
        rows, inputs = rule.axes
        assert inputs in _IN_WORDS, "packed along the inputs"
        words, groups = _IN_WORDS[inputs]
        found[f"{part}_packed"] = TensorRule(
            name=f"{rule.name}_packed", axes=(rows, words), transform=bytes_of_words, stored=WORDS
        )
        found[f"{part}_scale"] = TensorRule(name=f"{rule.name}_scale", axes=(rows, groups))
    return found


INT4_GROUP = BLOCK
_IN_WORDS: Mapping[Axis, tuple[Axis, Axis]] = {
    "hidden": ("hidden_words", "hidden_blocks"),
    "expert_inner": ("expert_inner_words", "expert_inner_blocks"),
}
