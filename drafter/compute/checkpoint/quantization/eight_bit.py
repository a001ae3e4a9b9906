"""Codes of eight bits, one per element: FP8 (E4M3) and INT8.

    MODULE.weight             e4m3 or int8 [O, I]         w = (code - zero) * scale
    MODULE.weight_scale       per tensor [1], per channel [O, 1], or per block [ceil(O / R), ceil(I / C)]
    MODULE.weight_scale_inv   the same; multiplied, despite its name (DeepSeek-V3, arXiv 2412.19437, 3.3)
    MODULE.weight_zero_point  int8, like the scale; of asymmetric INT8 alone

Scales of activations (`input_scale`, `activation_scale`) are unused: activations are not quantized here, so
outputs are at least as exact as the publisher's, but not the same bits.

Legend: O, I rows and columns of a matrix; R, C those of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, AliasChoices, Field
from torch import Tensor

from ..hf_config import Count, HfConfig, Json, parse
from ..quantized_matrix import PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .checkpoint_quantization import KEY, CheckpointQuantization
from .module_patterns import LINEAR, unconverted
from .scheme import (
    FLOAT_SCALES,
    Scheme,
    Shape,
    StoredForm,
    aligned_groups,
    as_int8,
    enclosing,
    expand,
    packed_form,
    read_scales,
)

Granularity = Literal["tensor", "channel", "block", "tensor or channel"]
_SCALES = ("weight_scale_inv", "weight_scale")
_EXPONENTS = ("F8_E8M0",)  # scales that are powers of two


@dataclass(frozen=True, slots=True)
class EightBit(Scheme):
    """FP8 or INT8. `code`: dtype of the codes in safetensors' notation; `granularity`: what shares a scale.

    `block`: rows and columns of a block; a group of columns in one row is (1, columns).
    """

    code: Literal["F8_E4M3", "I8"]
    granularity: Granularity
    block: tuple[int, int] | None = None
    symmetric: bool = True

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        return (self.code,)

    @property
    def dtype(self) -> str:
        return self.code

    @property
    def packed_form(self) -> PackedForm | None:
        code, group = (
            "e4m3" if self.code == "F8_E4M3" else "int8",
            None if self.block is None else self.block[1],
        )
        return packed_form(code, group, torch.float32)

    def __str__(self) -> str:
        name = "FP8" if self.code == "F8_E4M3" else "INT8"
        if self.block is not None:
            return f"{name} in blocks of {self.block[0]} x {self.block[1]}"
        return f"{name} with a scale per {self.granularity}"

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        rows, columns = (*stored.shapes[f"{module}.weight"], 1, 1)[:2]
        return rows, columns

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        scales = self._scale_shapes(shape)
        parts: dict[str, StoredForm] = {
            f"{module}.weight": ((shape,), self.code_dtypes),
            self._scale_name(stored, module): (scales, FLOAT_SCALES + _EXPONENTS),
        }
        if not self.symmetric:
            parts[f"{module}.weight_zero_point"] = (scales, (self.code,))
        return parts

    def _scale_name(self, stored: TensorHeaders, module: str) -> str:
        names = [f"{module}.{scale}" for scale in _SCALES]
        return next((name for name in names if name in stored.shapes), names[self.block is None])

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        if self.block is not None:
            (rows, columns), (row_step, column_step) = shape, self.block
            return ((-(-rows // row_step), -(-columns // column_step)),)
        per_tensor, per_channel = ((1,), (), (1, 1)), ((shape[0], 1), (shape[0],))
        choices = {"tensor": per_tensor, "channel": per_channel}
        return choices.get(self.granularity, (*per_tensor, *per_channel))

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        values = files.part(f"{module}.weight", rows, columns).float()
        if not self.symmetric:
            values -= self._expanded(files, f"{module}.weight_zero_point", rows, columns)
        return values.mul_(self._expanded(files, self._scale_name(files, module), rows, columns))

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        groups = aligned_groups(columns, None if self.block is None else self.block[1])
        if groups is None:
            return None
        codes_OI = files.part(f"{module}.weight", rows, columns)
        scales_OG = self._of_rows(files, self._scale_name(files, module), rows, groups)
        if scales_OG.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            scales_OG = scales_OG.float()
        if self.code == "F8_E4M3":
            return QuantizedMatrix("e4m3", codes_OI.view(torch.uint8), scales_OG)
        if not self.symmetric:
            zeros_OG = self._of_rows(files, f"{module}.weight_zero_point", rows, groups)
            codes_OI = as_int8(codes_OI, zeros_OG)
        return None if codes_OI is None else QuantizedMatrix("int8", codes_OI, scales_OG)

    def _of_rows(self, files: TensorFolder, name: str, rows: slice, groups: slice) -> Tensor:
        """Return scales or zero points of every row, [rows, groups], as they are stored."""
        if self.block is None:
            stored = read_scales(files, name).reshape(-1, 1)
            return stored.expand(rows.stop - rows.start, 1).contiguous() if len(stored) == 1 else stored[rows]
        row_range, _ = enclosing(rows, self.block[0])
        return expand(read_scales(files, name, row_range, groups), rows, self.block[0], 0).contiguous()

    def _expanded(self, files: TensorFolder, name: str, rows: slice, columns: slice) -> Tensor:
        """Return scales or zero points in a shape that broadcasts to [rows, columns]."""
        if self.block is None:
            scales = read_scales(files, name).float().reshape(-1, 1)
            return scales if len(scales) == 1 else scales[rows]
        (row_range, _), (column_range, _) = (
            enclosing(part, step) for part, step in zip((rows, columns), self.block, strict=True)
        )
        scales = read_scales(files, name, row_range, column_range).float()
        return expand(expand(scales, rows, self.block[0], 0), columns, self.block[1], 1)


def _check_two_sizes(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sizes is not None and len(sizes) != 2:
        raise ValueError("must be a list of two positive integers: rows and columns of a block")
    return sizes


class Fp8Config(HfConfig):
    """Keys of vLLM's and transformers' FP8, and of FBGEMM's."""

    quant_method: Literal["fp8", "fbgemm_fp8"]
    fmt: Literal["float8_e4m3fn", "e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: Annotated[tuple[Count, ...] | None, AfterValidator(_check_two_sizes)] = None
    modules_to_not_convert: tuple[str, ...] = Field(
        (),
        validation_alias=AliasChoices("modules_to_not_convert", "ignored_layers"),
        description="a list of names of modules",
    )
    expert_dtype: Literal["fp8"] = "fp8"


def read_fp8(raw: Json, file: str) -> CheckpointQuantization:
    config = parse(Fp8Config, raw, file, KEY)
    block = None
    if config.weight_block_size is not None:
        rows, columns = config.weight_block_size
        block = (rows, columns)
    scheme = EightBit("F8_E4M3", "tensor or channel" if block is None else "block", block)
    return CheckpointQuantization(
        method=config.quant_method,
        file=file,
        ignored=unconverted(config.modules_to_not_convert, file, f"{KEY}.modules_to_not_convert"),
        targets=((LINEAR, scheme),),
        quantizes_activations=True,
    )
