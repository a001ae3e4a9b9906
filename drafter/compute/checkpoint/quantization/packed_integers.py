"""Integers packed into words of 32 bits: AWQ, GPTQ, AutoRound and compressed-tensors' `pack-quantized`.

Every format stores codes of a matrix, and a scale and a zero for each group of a row's inputs:

    w = (code - zero) * scale

A `Packing` says which tensors a format has and how they lie: `AWQ`, `GPTQ` and `PACK_QUANTIZED`, in the
modules that read these formats' configurations. AutoRound has those of AWQ and GPTQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .....cluster.errors import CheckpointError
from ..quantized_matrix import ZERO, PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders
from .bit_packing import WORD_BITS, num_words, unpack, word_range
from .scheme import (
    FLOAT_SCALES,
    Scheme,
    StoredForm,
    aligned_groups,
    as_int8,
    describe_scales,
    packed_form,
    read_scales,
    require_finite,
    require_multiple,
)

_INTEGERS = ("I64", "I32")
Bits = Literal[2, 3, 4, 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The names of a format's tensors, and how they hold codes [O, I], and scales and zeros [O, G].

    Attributes:
        label: begins the description of a matrix.
        codes, scales, zeros, index: last components of names; `index`, which a matrix may lack, has each
            input's group.
        shape: of a tensor with O and I, else None.
        is_transposed: whether tensors are stored [I, O] and [G, O].
        packs_outputs: whether a word has codes of adjacent outputs, as zeros always do; else of inputs.
        order: the place in a word of each of its codes; (): the first code is lowest.
        plain_zeros: dtypes of zeros that are not packed; those are signed.
        has_part_groups: whether the last group of a row may be smaller.
        scales_dtype: of published checkpoints; planning counts it.
        has_zeros: whether published checkpoints have other zeros than the middle code; planning counts them.
    """

    label: str = ""
    codes: str
    scales: str
    zeros: str
    index: str = "g_idx"
    shape: str | None = None
    is_transposed: bool = False
    packs_outputs: bool = False
    order: tuple[int, ...] = ()
    plain_zeros: tuple[str, ...] = ()
    has_part_groups: bool = False
    scales_dtype: torch.dtype = torch.float16
    has_zeros: bool = True

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        return (inputs, outputs) if self.is_transposed else (outputs, inputs)

    def part(self, files: TensorFolder, name: str, outputs: slice, inputs: slice) -> Tensor:
        """Return a part of a stored tensor as [outputs, inputs]."""
        if self.is_transposed:
            return files.part(name, inputs, outputs).T
        return files.part(name, outputs, inputs)

    def unpack(self, words_RW: Tensor, bits: int) -> Tensor:
        """Return the codes along the last dimension, uint8, in order."""
        codes_RC = unpack(words_RW, bits)
        if not self.order:
            return codes_RC
        return codes_RC.unflatten(-1, (-1, len(self.order)))[..., self.order].flatten(-2)


@dataclass(frozen=True, slots=True)
class PackedIntegers(Scheme):
    """Integers in words; `group` inputs of a row share a scale (None: all), or the matrix if `per_tensor`.

    Attributes:
        symmetric: whether no zeros are stored: all are the middle code.
        zero_offset: what is added to stored zeros, modulo 2^bits.
        act_order: whether the files must name each input's group.
    """

    packing: Packing
    bits: Bits
    group: int | None
    per_tensor: bool = False
    symmetric: bool = False
    zero_offset: Literal[0, 1] = 0
    act_order: bool = False

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        return ("I32",)

    @property
    def dtype(self) -> str:
        return f"INT{self.bits}"

    @property
    def packed_form(self) -> PackedForm | None:
        if self.act_order or self.bits not in (4, 8):
            return None
        has_zeros = self.bits == 4 and self.packing.has_zeros and not self.symmetric
        code = "int4" if self.bits == 4 else "int8"
        return packed_form(code, self.group, self.packing.scales_dtype, int(has_zeros))

    def __str__(self) -> str:
        scales = describe_scales(self.group, "tensor" if self.per_tensor else "channel")
        return f"{self.packing.label}INT{self.bits} {scales}" + ", act-order" * self.act_order

    def codes_name(self, module: str) -> str:
        return f"{module}.{self.packing.codes}"

    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        """Return the matrix's [O, I]; the packed shape alone does not say how full the last word is."""
        packing, shapes = self.packing, stored.shapes
        rows, columns = packing.stored_shape(*(*shapes[self.codes_name(module)], 1, 1)[:2])
        if packing.packs_outputs:
            return rows * WORD_BITS // self.bits, columns
        # The last word of a row may be only partly used.
        if index := shapes.get(f"{module}.{packing.index}"):
            return rows, index[0]
        if packing.shape is not None:
            scales, name = shapes.get(f"{module}.{packing.scales}", ()), f"{module}.{packing.shape}"
            if self.group is not None and len(scales) == 2:
                return rows, scales[1] * self.group
            if isinstance(stored, TensorFolder) and name in shapes:
                return rows, int(stored.get(name).flatten()[-1])
        return rows, columns * WORD_BITS // self.bits

    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        """Return the shapes and dtypes that each stored tensor of a matrix [O, I] may have, by name."""
        packing, (rows, columns) = self.packing, shape
        row_words, words = num_words(rows, self.bits), num_words(columns, self.bits)
        if packing.packs_outputs:
            require_multiple(stored, module, "outputs", rows, WORD_BITS // self.bits)
        if self.group is not None and not packing.has_part_groups:
            require_multiple(stored, module, "inputs", columns, self.group)
        groups = 1 if self.group is None else -(-columns // self.group)
        codes = (row_words, columns) if packing.packs_outputs else (rows, words)
        scales = ((1,), (), (1, 1)) if self.per_tensor else (packing.stored_shape(rows, groups),)
        parts: dict[str, StoredForm] = {
            self.codes_name(module): ((packing.stored_shape(*codes),), self.code_dtypes),
            f"{module}.{packing.scales}": (scales, FLOAT_SCALES),
        }
        if packing.shape is not None:
            parts[f"{module}.{packing.shape}"] = (((2,),), _INTEGERS)
        if not self.symmetric:
            name = f"{module}.{packing.zeros}"
            is_packed = stored.dtypes.get(name) not in packing.plain_zeros
            zeros = packing.stored_shape(row_words if is_packed else rows, groups)
            parts[name] = ((zeros,), self.code_dtypes if is_packed else packing.plain_zeros)
        if self.act_order or f"{module}.{packing.index}" in stored.shapes:
            parts[f"{module}.{packing.index}"] = (((columns,),), _INTEGERS)
        return parts

    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        places, groups = self._groups(files, module, columns)
        values_OI = self._codes(files, module, rows, columns).float()
        values_OI -= self._zeros(files, module, rows, groups).float()[:, places]
        return values_OI.mul_(self._scales(files, module, rows, groups).float()[:, places])

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        groups, index = aligned_groups(columns, self.group), self._index(files, module, columns)
        is_in_order = index is None or torch.equal(index, self._in_order(columns))
        if groups is None or self.bits not in (4, 8) or not is_in_order:
            return None
        codes_OI = self._codes(files, module, rows, columns).contiguous()
        scales_OG = self._scales(files, module, rows, groups)
        zeros_OG = self._zeros(files, module, rows, groups).expand(len(codes_OI), -1).to(torch.uint8)
        if self.bits == 4:
            is_middle = bool((zeros_OG == ZERO).all())
            kept_OG = None if is_middle else zeros_OG.contiguous()
            return QuantizedMatrix("int4", codes_OI, scales_OG.contiguous(), kept_OG)
        signed_OI = as_int8(codes_OI, zeros_OG)
        return None if signed_OI is None else QuantizedMatrix("int8", signed_OI, scales_OG.contiguous())

    def _codes(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        self._check_shape(files, module)
        dim = 0 if self.packing.packs_outputs else 1
        return self._unpacked(files, self.codes_name(module), rows, columns, dim)

    def _zeros(self, files: TensorFolder, module: str, rows: slice, groups: slice) -> Tensor:
        """Return the unsigned codes of zero, integers [rows, groups]; [1, groups] of symmetric weights."""
        name, middle = f"{module}.{self.packing.zeros}", 2 ** (self.bits - 1)
        if self.symmetric:
            return torch.full((1, groups.stop - groups.start), middle)
        if files.dtypes[name] in self.packing.plain_zeros:
            # Signed; the unsigned codes have the middle one added.
            return self.packing.part(files, name, rows, groups).short() + middle
        zeros_OG = self._unpacked(files, name, rows, groups, 0)
        # The offset may carry a zero past the largest code, to 0.
        return (zeros_OG + self.zero_offset) & (2**self.bits - 1)

    def _unpacked(self, files: TensorFolder, name: str, rows: slice, columns: slice, dim: int) -> Tensor:
        """Return a part of a tensor whose words lie along dimension `dim`, uint8 [rows, columns]."""
        part = [rows, columns]
        size = part[dim].stop - part[dim].start
        part[dim], first = word_range(part[dim], self.bits)
        words = self.packing.part(files, name, *part).movedim(dim, 1)
        return self.packing.unpack(words, self.bits).narrow(1, first, size).movedim(1, dim)

    def _scales(self, files: TensorFolder, module: str, rows: slice, groups: slice) -> Tensor:
        name = f"{module}.{self.packing.scales}"
        if self.per_tensor:
            return read_scales(files, name).reshape(1, 1).expand(rows.stop - rows.start, 1)
        return require_finite(self.packing.part(files, name, rows, groups), files, name)

    def _groups(self, files: TensorFolder, module: str, columns: slice) -> tuple[Tensor, slice]:
        """Return each input's group relative to the first used, and the range used."""
        index = self._index(files, module, columns)
        if index is None or bool((index == -1).all()):  # compressed-tensors' mark of consecutive groups
            index = self._in_order(columns)
        scales = files.shapes[f"{module}.{self.packing.scales}"]
        count = 1 if self.group is None else scales[0 if self.packing.is_transposed else 1]
        first, last = int(index.min()), int(index.max())
        if first < 0 or last >= count:
            name = f"{module}.{self.packing.index}"
            raise CheckpointError(
                f"{files.where}: {name} names groups {first} to {last}, but there are {count}; download "
                "again.",
                param=name,
            )
        return index - first, slice(first, last + 1)

    def _index(self, files: TensorFolder, module: str, columns: slice) -> Tensor | None:
        """Return the stored group of each input, int64; None: groups are consecutive."""
        name = f"{module}.{self.packing.index}"
        return files.part(name, columns).long() if name in files.shapes else None

    def _in_order(self, columns: slice) -> Tensor:
        return torch.arange(columns.start, columns.stop) // (self.group or columns.stop)

    def _check_shape(self, files: TensorFolder, module: str) -> None:
        if self.packing.shape is None:
            return
        name, words = f"{module}.{self.packing.shape}", files.shapes[self.codes_name(module)]
        rows, columns = (int(size) for size in files.get(name))
        if words != (rows, num_words(columns, self.bits)):
            raise CheckpointError(
                f"{files.where}: {name} is {[rows, columns]}, but its codes have shape {list(words)}; "
                "download again.",
                param=name,
            )
