"""GPTQ: integers packed along the inputs, transposed (AutoGPTQ, GPTQModel, AutoRound).

    MODULE.qweight  int32 [ceil(I * bits / 32), O]       w = (code - zero) * scale, of the input's group
    MODULE.qzeros   int32 [G, ceil(O * bits / 32)]       zero - 1 in the first version, zero in the second
    MODULE.scales   [G, O]
    MODULE.g_idx    int32 [I]: each input's group; absent: groups are consecutive

The one is added to a zero modulo 2^bits, as in exllama's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field

from ..hf_config import HfConfig, Json, Off, parse
from .checkpoint_quantization import KEY, CheckpointQuantization
from .module_patterns import LINEAR, ModulePatterns, expressions_of, unconverted
from .packed_integers import Bits, PackedIntegers, Packing
from .scheme import WHOLE_ROW, GroupSize

GPTQ = Packing(
    label="GPTQ ",
    codes="qweight",
    scales="scales",
    zeros="qzeros",
    is_transposed=True,
    has_part_groups=True,
    has_zeros=False,
)


class GptqConfig(HfConfig):
    quant_method: Literal["gptq"]
    bits: Bits
    group_size: GroupSize
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Literal["gptq", "gptq_v2"] = Field(
        "gptq",
        validation_alias=AliasChoices("checkpoint_format", "format"),
        description="'gptq' or 'gptq_v2': repacked checkpoints are not served",
    )
    is_marlin_format: Off = False
    pack_dtype: Literal["int32"] = "int32"
    adapter: Off = False
    dynamic: dict[str, Any] = Field({}, description="an object by pattern")  # Any: JSON values
    modules_to_not_convert: tuple[str, ...] = Field((), description="a list of names of modules")


class _DynamicEntry(HfConfig):
    bits: Bits | None = None
    group_size: GroupSize | None = None
    desc_act: bool | None = None


def read_gptq(raw: Json, file: str) -> CheckpointQuantization:
    config = parse(GptqConfig, raw, file, KEY)
    offset = 0 if config.checkpoint_format == "gptq_v2" else 1
    skipped = unconverted(config.modules_to_not_convert, file, f"{KEY}.modules_to_not_convert")
    ignored, targets = list(skipped.patterns), []
    for key, changes in config.dynamic.items():
        at = f"{KEY}.dynamic.{key}"
        patterns = expressions_of("match", [re.sub(r"^[+-]:", "", key)], file, at)
        if key.startswith("-:"):
            ignored += patterns
            continue
        own = parse(_DynamicEntry, changes, file, at) if isinstance(changes, Mapping) else _DynamicEntry()
        targets.append((ModulePatterns(patterns=patterns), _scheme(config, own, offset)))
    return CheckpointQuantization(
        method="gptq",
        file=file,
        ignored=ModulePatterns(patterns=tuple(ignored)),
        targets=(*targets, (LINEAR, _scheme(config, _DynamicEntry(), offset))),
    )


def _scheme(config: GptqConfig, own: _DynamicEntry, offset: Literal[0, 1]) -> PackedIntegers:
    group = own.group_size or config.group_size
    act_order = config.desc_act if own.desc_act is None else own.desc_act
    groups, bits = None if group == WHOLE_ROW else group, own.bits or config.bits
    return PackedIntegers(GPTQ, bits, groups, zero_offset=offset, act_order=act_order)
