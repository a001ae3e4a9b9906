"""compressed-tensors' `quantization_config`: groups of modules, each with a scheme of its own.

    float-quantized, int-quantized, naive-quantized   `eight_bit.py`
    pack-quantized                                    `packed_integers.py`, as `PACK_QUANTIZED`
    mxfp4-pack-quantized, nvfp4-pack-quantized        `fp4.py`

Integers of 4 or 8 bits are packed along the inputs:

    MODULE.weight_packed      int32 [O, ceil(I * bits / 32)]     w = (code - zero) * scale
    MODULE.weight_scale       [O, G]; per channel [O, 1]; per tensor [1]
    MODULE.weight_shape       [2]: O and I
    MODULE.weight_zero_point  int32 [ceil(O * bits / 32), G], packed along the outputs; or int8 [O, G]
    MODULE.weight_g_idx       int32 [I]: each input's group (act-order); -1: groups are consecutive

Codes are unsigned in the files; of symmetric weights the zero is the middle one.

Sparse layouts and `transform_config` are refused. Activations are not quantized here, even if declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field

from ..hf_config import Count, HfConfig, Json, Off, parse, wrong
from .checkpoint_quantization import KEY, CheckpointQuantization
from .eight_bit import EightBit
from .fp4 import CompressedNvfp4, Mxfp4Linear
from .kv_scales import is_fp8_kv
from .module_patterns import names_and_classes
from .packed_integers import PackedIntegers, Packing
from .scheme import WHOLE_ROW, GroupSize, Scheme

PACK_QUANTIZED = Packing(
    codes="weight_packed",
    scales="weight_scale",
    zeros="weight_zero_point",
    index="weight_g_idx",
    shape="weight_shape",
    plain_zeros=("I8",),
    scales_dtype=torch.bfloat16,
)
_ACT_ORDER = ("group", "dynamic", True)
_PLAIN_CODES = ("float-quantized", "int-quantized", "naive-quantized")
_SERVED = (
    "float-quantized or int-quantized (8 bits), pack-quantized (integers of 4 or 8 bits), "
    "nvfp4-pack-quantized (groups of 16) or mxfp4-pack-quantized (groups of 32); others are not served"
)


def _check_dense(config: Any) -> None:  # Any: JSON values
    layout = config.get("format", "dense") if isinstance(config, Mapping) else config
    if layout not in (None, "dense", False):
        raise ValueError("must be absent or dense: sparse layouts are not served")


class _WeightSettings(HfConfig):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: GroupSize | None = None
    block_structure: tuple[Count, ...] | None = None
    actorder: bool | Literal["group", "weight", "static", "dynamic"] | None = None

    @property
    def group(self) -> int | None:
        return None if self.group_size == WHOLE_ROW else self.group_size


class _Group(HfConfig):
    targets: tuple[str, ...] = ("Linear",)
    weights: _WeightSettings | None = None
    format: str | None = None
    input_activations: Any = None  # Any: JSON values; not applied
    output_activations: Any = None  # Any: JSON values; not applied


class CompressedTensorsConfig(HfConfig):
    quant_method: Literal["compressed-tensors"]
    format: str | None = None
    # The first versions wrote "frozen" with compressed weights, too; plain ones are refused for their scales.
    quantization_status: Literal["compressed", "frozen"] = "compressed"
    config_groups: dict[str, Any] = Field({}, description="an object of groups")  # Any: JSON values
    ignore: tuple[str, ...] = Field((), description="a list of names of modules")
    kv_cache_scheme: Any = None  # Any: JSON values
    sparsity_config: Annotated[Any, AfterValidator(_check_dense)] = None
    transform_config: Off = False


def read_compressed_tensors(raw: Json, file: str) -> CheckpointQuantization:
    transforms = raw.get("transform_config") or False  # an empty object transforms nothing
    config = parse(CompressedTensorsConfig, {**raw, "transform_config": transforms}, file, KEY)
    groups: list[_Group] = []
    targets: list[tuple[Any, Scheme | None]] = []
    for name, stated in config.config_groups.items():
        at = f"{KEY}.config_groups.{name}"
        if not isinstance(stated, Mapping):
            raise wrong(file, at, stated, "an object with targets and weights")
        group = parse(_Group, stated, file, at)
        groups.append(group)
        layout = group.format or config.format
        scheme = None if group.weights is None else _scheme(group.weights, layout, file, at)
        targets.append((names_and_classes(group.targets, file, f"{at}.targets"), scheme))
    return CheckpointQuantization(
        method="compressed-tensors",
        file=file,
        ignored=names_and_classes(config.ignore, file, f"{KEY}.ignore"),
        targets=tuple(targets),
        quantizes_activations=any(group.input_activations or group.output_activations for group in groups),
        quantizes_kv_cache=config.kv_cache_scheme is not None,
        has_fp8_kv_scales=is_fp8_kv(config.kv_cache_scheme),
    )


def _scheme(weights: _WeightSettings, layout: str | None, file: str, at: str) -> Scheme:
    match (layout, weights.type, weights.num_bits, weights.group):
        case (layout, "float", 8, _) if layout in _PLAIN_CODES:
            return _eight_bit(weights, "F8_E4M3", file, at)
        case (layout, "int", 8, _) if layout in _PLAIN_CODES:
            return _eight_bit(weights, "I8", file, at)
        case ("pack-quantized", "int", _, _):
            return _packed(weights, file, at)
        case ("nvfp4-pack-quantized", "float", 4, 16) if weights.symmetric:
            return CompressedNvfp4()
        case ("mxfp4-pack-quantized", "float", 4, 32) if weights.symmetric:
            return Mxfp4Linear()
        case _:
            bits = f"{weights.type} of {weights.num_bits} bits"
            stated = f"{layout}, {bits}, group_size {weights.group_size}"
            raise wrong(file, f"{at}.format", stated, _SERVED)


def _eight_bit(weights: _WeightSettings, code: Literal["F8_E4M3", "I8"], file: str, at: str) -> EightBit:
    if code == "F8_E4M3" and not weights.symmetric:
        raise wrong(file, f"{at}.weights.symmetric", weights.symmetric, "true for floating-point codes")
    match weights.strategy or ("channel" if weights.group_size == WHOLE_ROW else "tensor"):
        case "tensor" | "channel" as granularity:
            return EightBit(code, granularity, None, weights.symmetric)
        case "group" if weights.group is not None:
            return EightBit(code, "block", (1, weights.group), weights.symmetric)
        case "block" if weights.block_structure is not None and len(weights.block_structure) == 2:
            rows, columns = weights.block_structure
            return EightBit(code, "block", (rows, columns), weights.symmetric)
        case other:
            wanted = "tensor, channel, group with group_size, or block with block_structure"
            raise wrong(file, f"{at}.weights.strategy", other, wanted)


def _packed(weights: _WeightSettings, file: str, at: str) -> PackedIntegers:
    strategy = weights.strategy or ("group" if weights.group is not None else "channel")
    if strategy not in ("tensor", "channel", "group") or (strategy == "group") != (weights.group is not None):
        wanted = "group with a group_size, channel or tensor, for packed integers"
        raise wrong(file, f"{at}.weights.strategy", strategy, wanted)
    if strategy == "tensor" and not weights.symmetric:
        raise wrong(file, f"{at}.weights.symmetric", weights.symmetric, "true with one scale per tensor")
    return PackedIntegers(
        PACK_QUANTIZED,
        weights.num_bits,
        weights.group,
        per_tensor=strategy == "tensor",
        symmetric=weights.symmetric,
        act_order=weights.actorder in _ACT_ORDER,
    )
