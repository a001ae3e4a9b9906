"""AWQ (AutoAWQ's "gemm" packing): integers of four bits packed along the outputs.

    MODULE.qweight  int32 [I, O / 8]     w = (code - zero) * scale, of the input's group
    MODULE.qzeros   int32 [G, O / 8]
    MODULE.scales   [G, O]

The nibbles of a word, lowest first, hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from ..hf_config import HfConfig, Json, parse
from .checkpoint_quantization import KEY, CheckpointQuantization
from .module_patterns import LINEAR, unconverted
from .packed_integers import PackedIntegers, Packing
from .scheme import WHOLE_ROW, GroupSize

AWQ = Packing(
    label="AWQ ",
    codes="qweight",
    scales="scales",
    zeros="qzeros",
    is_transposed=True,
    packs_outputs=True,
    order=(0, 4, 1, 5, 2, 6, 3, 7),
)


class AwqConfig(HfConfig):
    quant_method: Literal["awq"]
    bits: Literal[4] = Field(4, validation_alias=AliasChoices("bits", "w_bit"))
    group_size: GroupSize = Field(128, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: Literal[True] = Field(True, description="true: symmetric AWQ has no published packing")
    version: Literal["gemm", "GEMM"] = Field(
        "gemm", description="'gemm': packings for single kernels (gemv, marlin, exllama) are not served"
    )
    modules_to_not_convert: tuple[str, ...] = Field((), description="a list of names of modules")


def read_awq(raw: Json, file: str) -> CheckpointQuantization:
    config = parse(AwqConfig, raw, file, KEY)
    group = None if config.group_size == WHOLE_ROW else config.group_size
    return CheckpointQuantization(
        method="awq",
        file=file,
        ignored=unconverted(config.modules_to_not_convert, file, f"{KEY}.modules_to_not_convert"),
        targets=((LINEAR, PackedIntegers(AWQ, 4, group)),),
    )
