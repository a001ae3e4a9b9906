"""AWQ (AutoAWQ's "gemm" packing): integers of four bits packed along the outputs.

    MODULE.qweight  int32 [I, O / 8]     w = (code - zero) * scale, of the input's group
    MODULE.qzeros   int32 [G, O / 8]
    MODULE.scales   [G, O]

The nibbles of a word, lowest first, hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from ..hf_config import HfConfig, Json, parse
from ..quantized_matrix import PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .bit_packing import unpack, word_range
from .checkpoint_quantization import KEY, CheckpointQuantization
from .module_patterns import LINEAR, unconverted
from .scheme import (
    FLOAT_SCALES,
    WHOLE_ROW,
    GroupSize,
    StoredForm,
    WordScheme,
    aligned_groups,
    columns_in_order,
    describe_scales,
    int4_matrix,
    packed_form,
    read_scales,
    require_multiple,
    rows_of_groups,
)

_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each output of a word


@dataclass(frozen=True, slots=True)
class Awq(WordScheme):
    """AWQ's integers; `group` inputs share a scale (None: all)."""

    CODES: ClassVar[str] = "qweight"

    group: int | None

    @property
    def dtype(self) -> str:
        return "INT4"

    @property
    def packed_form(self) -> PackedForm | None:
        return packed_form("int4", self.group, torch.float16, shift_bytes=1)

    def __str__(self) -> str:
        return f"AWQ INT4 {describe_scales(self.group)}"

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        columns, words = (*stored.shapes[f"{module}.qweight"], 1, 1)[:2]
        return words * _PER_WORD, columns

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        rows, columns = shape
        require_multiple(stored, module, "outputs", rows, _PER_WORD)
        groups = 1
        if self.group is not None:
            require_multiple(stored, module, "inputs", columns, self.group)
            groups = columns // self.group
        return {
            f"{module}.qweight": (((columns, rows // _PER_WORD),), self.code_dtypes),
            f"{module}.qzeros": (((groups, rows // _PER_WORD),), ("I32",)),
            f"{module}.scales": (((groups, rows),), FLOAT_SCALES),
        }

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        words, first = word_range(rows, _BITS)
        num_rows = rows.stop - rows.start
        index = columns_in_order(columns, self.group or columns.stop)
        places, groups = rows_of_groups(index, files.shapes[f"{module}.scales"][0], files, module)
        codes_IO = in_order(files.part(f"{module}.qweight", columns, words)).narrow(1, first, num_rows)
        zeros_GO = in_order(files.part(f"{module}.qzeros", groups, words)).narrow(1, first, num_rows)
        values_IO = codes_IO.float() - zeros_GO.float()[places]
        scales_GO = read_scales(files, f"{module}.scales", groups, rows).float()
        return values_IO.mul_(scales_GO[places]).T.contiguous()

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        if (groups := aligned_groups(columns, self.group)) is None:
            return None
        words, first = word_range(rows, _BITS)
        codes_IO = in_order(files.part(f"{module}.qweight", columns, words))
        zeros_GO = in_order(files.part(f"{module}.qzeros", groups, words))
        codes_OI, zeros_OG = (
            each.narrow(1, first, rows.stop - rows.start).T.contiguous() for each in (codes_IO, zeros_GO)
        )
        return int4_matrix(codes_OI, read_scales(files, f"{module}.scales", groups, rows).T, zeros_OG)


def in_order(words: Tensor) -> Tensor:
    """Return the codes of words along the last dimension, in the order of the outputs."""
    return unpack(words, _BITS).unflatten(-1, (-1, _PER_WORD))[..., _PLACES].flatten(-2)


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
        targets=((LINEAR, Awq(group)),),
    )
