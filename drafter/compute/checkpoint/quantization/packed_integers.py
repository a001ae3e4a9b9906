"""compressed-tensors' `pack-quantized`: integers packed along the inputs.

    MODULE.weight_packed      int32 [O, ceil(I * bits / 32)]     w = (code - zero) * scale
    MODULE.weight_scale       [O, G]; per channel [O, 1]; per tensor [1]
    MODULE.weight_shape       [2]: O and I
    MODULE.weight_zero_point  int32 [ceil(O * bits / 32), G], packed along the outputs; or int8 [O, G]
    MODULE.weight_g_idx       int32 [I]: each input's group (act-order); -1: groups are consecutive

Codes are unsigned in the files; of symmetric weights the zero is the middle one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .....cluster.errors import CheckpointError
from ..quantized_matrix import PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .bit_packing import WORD_BITS, num_words, unpack, word_range
from .scheme import (
    FLOAT_SCALES,
    StoredForm,
    WordScheme,
    aligned_groups,
    as_int8,
    columns_in_order,
    describe_scales,
    int4_matrix,
    packed_form,
    read_scales,
    require_multiple,
    rows_of_groups,
)

_INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True)
class PackedIntegers(WordScheme):
    """INT4 or INT8 in words; `group` inputs of a row share a scale (None: all), or all if `per_tensor`.

    `act_order`: whether inputs name their group.
    """

    CODES: ClassVar[str] = "weight_packed"

    bits: Literal[4, 8]
    group: int | None
    per_tensor: bool = False
    symmetric: bool = True
    act_order: bool = False

    @property
    def dtype(self) -> str:
        return f"INT{self.bits}"

    @property
    def packed_form(self) -> PackedForm | None:
        if self.act_order:
            return None
        has_zeros = self.bits == 4 and not self.symmetric
        return packed_form("int4" if self.bits == 4 else "int8", self.group, torch.bfloat16, int(has_zeros))

    def __str__(self) -> str:
        per = "tensor" if self.per_tensor else "channel"
        return f"INT{self.bits} {describe_scales(self.group, per)}" + ", act-order" * self.act_order

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        rows, words = (*stored.shapes[f"{module}.{self.CODES}"], 1, 1)[:2]
        scales = stored.shapes.get(f"{module}.weight_scale", ())
        if self.group is not None and len(scales) == 2:
            return rows, scales[1] * self.group
        if isinstance(stored, TensorFolder) and (name := f"{module}.weight_shape") in stored.shapes:
            return rows, int(stored.get(name).flatten()[-1])  # the last word may be only partly used
        return rows, words * WORD_BITS // self.bits

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        rows, columns = shape
        groups = 1
        if self.group is not None:
            require_multiple(stored, module, "inputs", columns, self.group)
            groups = columns // self.group
        scales = ((1,), (), (1, 1)) if self.per_tensor else ((rows, groups),)
        parts: dict[str, StoredForm] = {
            f"{module}.weight_packed": (((rows, num_words(columns, self.bits)),), self.code_dtypes),
            f"{module}.weight_scale": (scales, FLOAT_SCALES),
            f"{module}.weight_shape": (((2,),), _INTEGERS),
        }
        if not self.symmetric:
            name = f"{module}.weight_zero_point"
            packed = stored.dtypes.get(name) != "I8"
            zeros = (num_words(rows, self.bits), groups) if packed else (rows, groups)
            parts[name] = ((zeros,), ("I32",) if packed else ("I8",))
        if self.act_order:
            parts[f"{module}.weight_g_idx"] = (((columns,),), _INTEGERS)
        return parts

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        self._check_shape(files, module)
        words, first = word_range(columns, self.bits)
        codes = unpack(files.part(f"{module}.weight_packed", rows, words), self.bits)
        values = codes.narrow(1, first, columns.stop - columns.start).float()
        if self.per_tensor:
            scale = read_scales(files, f"{module}.weight_scale").float().reshape(())
            return (values - 2 ** (self.bits - 1)).mul_(scale)
        places, groups = self._groups(files, module, columns)
        values -= self._zeros(files, module, rows, groups)[:, places]
        return values.mul_(read_scales(files, f"{module}.weight_scale", rows, groups).float()[:, places])

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        groups = aligned_groups(columns, self.group)
        if groups is None or self.act_order:
            return None
        self._check_shape(files, module)
        words, first = word_range(columns, self.bits)
        codes_OI = unpack(files.part(f"{module}.weight_packed", rows, words), self.bits)
        codes_OI = codes_OI.narrow(1, first, columns.stop - columns.start)
        name, num_rows = f"{module}.weight_scale", rows.stop - rows.start
        if self.per_tensor:
            scales_OG = read_scales(files, name).reshape(1, 1).expand(num_rows, 1)
        else:
            scales_OG = read_scales(files, name, rows, groups)
        zeros_OG = self._zeros(files, module, rows, groups).expand(num_rows, -1).to(torch.uint8)
        if self.bits == 4:
            return int4_matrix(codes_OI, scales_OG, zeros_OG)
        signed_OI = as_int8(codes_OI, zeros_OG)
        return None if signed_OI is None else QuantizedMatrix("int8", signed_OI, scales_OG.contiguous())

    def _groups(self, files: TensorFolder, module: str, columns: slice) -> tuple[Tensor, slice]:
        count = files.shapes[f"{module}.weight_scale"][1]
        index = columns_in_order(columns, self.group or columns.stop)
        if self.act_order:
            name = f"{module}.weight_g_idx"
            stored = files.part(name, columns)
            index = index if int(stored.min()) < 0 else stored
        return rows_of_groups(index, count, files, f"{module}.weight_g_idx")

    def _zeros(self, files: TensorFolder, module: str, rows: slice, groups: slice) -> Tensor:
        """Return the unsigned codes of zero, fp32 [rows, groups] or [1, 1]."""
        middle, name = 2 ** (self.bits - 1), f"{module}.weight_zero_point"
        if self.symmetric:
            return torch.full((1, 1), float(middle)).expand(1, groups.stop - groups.start)
        if files.dtypes[name] == "I8":
            return files.part(name, rows, groups).float() + middle
        words, first = word_range(rows, self.bits)
        packed_GW = files.part(name, words, groups).T
        return unpack(packed_GW, self.bits).narrow(1, first, rows.stop - rows.start).T.float()

    def _check_shape(self, files: TensorFolder, module: str) -> None:
        name = f"{module}.weight_shape"
        rows, columns = (int(size) for size in files.get(name))
        words = files.shapes[f"{module}.weight_packed"]
        if words != (rows, num_words(columns, self.bits)):
            raise CheckpointError(
                f"{files.where}: {name} is {[rows, columns]}, but its codes have shape {list(words)}; "
                "download again.",
                param=name,
            )
