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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from ..hf_config import HfConfig, Json, Off, parse
from ..quantized_matrix import PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .bit_packing import WORD_BITS, num_words, unpack, word_range
from .checkpoint_quantization import KEY, CheckpointQuantization
from .module_patterns import LINEAR, ModulePatterns, expressions_of, unconverted
from .scheme import (
    FLOAT_SCALES,
    WHOLE_ROW,
    GroupSize,
    StoredForm,
    WordScheme,
    aligned_groups,
    as_int8,
    columns_in_order,
    describe_scales,
    int4_matrix,
    packed_form,
    read_scales,
    rows_of_groups,
)

Bits = Literal[2, 3, 4, 8]


@dataclass(frozen=True, slots=True)
class Gptq(WordScheme):
    """GPTQ's integers; `group` inputs share a scale (None: all), and `zero_offset` is added to stored zeros.

    `act_order`: whether the files must name each input's group.
    """

    CODES: ClassVar[str] = "qweight"

    bits: Bits
    group: int | None
    zero_offset: Literal[0, 1] = 1
    act_order: bool = False

    @property
    def dtype(self) -> str:
        return f"INT{self.bits}"

    @property
    def packed_form(self) -> PackedForm | None:
        if self.act_order or self.bits not in (4, 8):
            return None
        return packed_form("int4" if self.bits == 4 else "int8", self.group, torch.float16)  # the zero is 8

    def __str__(self) -> str:
        return f"GPTQ INT{self.bits} {describe_scales(self.group)}" + ", act-order" * self.act_order

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        words, rows = (*stored.shapes[f"{module}.qweight"], 1, 1)[:2]
        index = stored.shapes.get(f"{module}.g_idx", ())
        return rows, index[0] if index else words * WORD_BITS // self.bits

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        rows, columns = shape
        groups = 1 if self.group is None else -(-columns // self.group)
        parts: dict[str, StoredForm] = {
            f"{module}.qweight": (((num_words(columns, self.bits), rows),), self.code_dtypes),
            f"{module}.qzeros": (((groups, num_words(rows, self.bits)),), ("I32",)),
            f"{module}.scales": (((groups, rows),), FLOAT_SCALES),
        }
        if self.act_order or f"{module}.g_idx" in stored.shapes:
            parts[f"{module}.g_idx"] = (((columns,),), ("I32", "I64"))
        return parts

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        words, first = word_range(columns, self.bits)
        codes_OI = unpack(files.part(f"{module}.qweight", words, rows).T, self.bits)
        values_OI = codes_OI.narrow(1, first, columns.stop - columns.start).float()
        places, groups = self._groups(files, module, columns)
        zeros_GO = self._zeros(files, module, rows, groups)
        values_OI -= zeros_GO.T[:, places].float()
        return values_OI.mul_(read_scales(files, f"{module}.scales", groups, rows).T.float()[:, places])

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        groups = aligned_groups(columns, self.group)
        if groups is None or self.bits not in (4, 8) or not self._is_in_order(files, module, columns):
            return None
        words, first = word_range(columns, self.bits)
        codes_OI = unpack(files.part(f"{module}.qweight", words, rows).T, self.bits)
        codes_OI = codes_OI.narrow(1, first, columns.stop - columns.start)
        zeros_OG = self._zeros(files, module, rows, groups).T
        scales_OG = read_scales(files, f"{module}.scales", groups, rows).T
        if self.bits == 4:
            return int4_matrix(codes_OI, scales_OG, zeros_OG)
        signed_OI = as_int8(codes_OI, zeros_OG)
        return None if signed_OI is None else QuantizedMatrix("int8", signed_OI, scales_OG.contiguous())

    def _is_in_order(self, files: TensorFolder, module: str, columns: slice) -> bool:
        name = f"{module}.g_idx"
        expected = columns_in_order(columns, self.group or columns.stop)
        return name not in files.shapes or torch.equal(files.part(name, columns).long(), expected)

    def _zeros(self, files: TensorFolder, module: str, rows: slice, groups: slice) -> Tensor:
        """Return the codes of zero, uint8 [groups, rows]."""
        words, first = word_range(rows, self.bits)
        zeros_GO = unpack(files.part(f"{module}.qzeros", groups, words), self.bits)
        zeros_GO = zeros_GO.narrow(1, first, rows.stop - rows.start)
        return (zeros_GO + 1) & (2**self.bits - 1) if self.zero_offset else zeros_GO

    def _groups(self, files: TensorFolder, module: str, columns: slice) -> tuple[Tensor, slice]:
        name = f"{module}.g_idx"
        count = files.shapes[f"{module}.scales"][0]
        index = columns_in_order(columns, self.group or columns.stop)
        if name in files.shapes:
            index = files.part(name, columns)
        return rows_of_groups(index, count, files, name)


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


def _scheme(config: GptqConfig, own: _DynamicEntry, offset: Literal[0, 1]) -> Gptq:
    group = own.group_size or config.group_size
    act_order = config.desc_act if own.desc_act is None else own.desc_act
    return Gptq(own.bits or config.bits, None if group == WHOLE_ROW else group, offset, act_order)
