"""Weights in the layouts that compiled products read: bf16, or codes with scales (`code_tiles.py`).

A compiled product takes the address of a WEIGHT. For codes, `prepare_panels` expands to fp32 what groups
share of the panels that are multiplied next, and `expand_panel` a whole panel to bf16: its values with AMX,
else its codes.

Legend: O outputs, K inputs, G groups of inputs with a scale, B blocks of groups, T = O / 16 tiles of columns.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional as F

from ..checkpoint.quantized_matrix import (
    BITS,
    WITH_OFFSETS,
    BlockedValues,
    Code,
    GroupValues,
    JoinedRows,
    Matrix,
    QuantizedMatrix,
)
from ..cpu_numba.element_ops import Task, elements, float_of, pointer, record_dtype, records
from ..cpu_numba.llvm_intrinsics import call_task, stack_memory
from .tiles.amx_tiles import COLUMNS
from .tiles.code_tiles import (
    EXPAND,
    FACTORS,
    code_product,
    multiply_signed,
    multiply_unsigned,
    widen_halves,
)
from .tiles.isa_dispatch import has_tiles
from .tiles.simd_tiles import ARGUMENTS, TILE_BYTES

MOST_TILES = 8  # multiplied at once
MOST_FORMS = 3  # of a weight: those of q, k and v
_BF16, _FP32, _BYTE = np.uint16(0), np.float32(0), np.uint8(0)
# `kernel`: address of the task of a kind of codes, 0 for bf16; `scratch_decoded`: offset of what is expanded
# in a thread's scratch memory; `shifts`: zeros or offsets. What groups share has a form (`_FORMS`), in two
# levels with 2^shift groups in each of so many blocks. A weight
# whose outputs have several forms is a WEIGHT for each, one after the other, up to panel `end` of 32 outputs.
WEIGHT = record_dtype(
    "end kernel codes tile_bytes pairs groups scratch_decoded"
    " scales scale_form scale_blocks scale_block_shift scale_num_blocks"
    " shifts shift_form shift_blocks shift_block_shift shift_num_blocks",
    "factor",
)
_FP32_FORM, _BF16_FORM, _FP16_FORM, _EXPONENTS, _ZEROS, _INT8_OF_BLOCKS, _UINT8_OF_BLOCKS = range(7)
_FORMS = {
    torch.float32: _FP32_FORM,
    torch.bfloat16: _BF16_FORM,
    torch.float16: _FP16_FORM,
    torch.uint8: _EXPONENTS,
}
_FORMS_OF_BLOCKS = {torch.int8: _INT8_OF_BLOCKS, torch.uint8: _UINT8_OF_BLOCKS}
_arguments_memory = stack_memory(128)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the groups of a weight share.

    Attributes:
        values_TG16: as `QuantizedMatrix` has it.
        blocks_TB16: fp16, by which the values are multiplied; None for one level.
    """

    form: int
    values_TG16: Tensor
    blocks_TB16: Tensor | None = None

    @classmethod
    def of(cls, values_OG: GroupValues, padding: tuple[int, ...], form: int | None = None) -> _Shared:
        if isinstance(values_OG, Tensor):
            return cls(
                _FORMS[values_OG.dtype] if form is None else form, _tiles_of(F.pad(values_OG, padding))
            )
        integers_OG, blocks_OB = values_OG.tensors()
        tiles = (_tiles_of(F.pad(each, padding)) for each in (integers_OG, blocks_OB))
        return cls(_FORMS_OF_BLOCKS[integers_OG.dtype], *tiles)

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.values_TG16, self.blocks_TB16) if each is not None]

    def rows(self, tile_N: Tensor, column_N: Tensor) -> GroupValues:
        values_NG, *blocks = (tensor[tile_N, :, column_N] for tensor in self.tensors)
        return BlockedValues(values_NG, *blocks) if blocks else values_NG

    def map(self, change: Callable[[Tensor], Tensor]) -> _Shared:
        return _Shared(self.form, *map(change, self.tensors))

    def write(self, w: np.void, name: str) -> None:
        """Set a WEIGHT's fields whose names begin with `name`."""
        w[f"{name}s"], w[f"{name}_form"] = self.values_TG16.data_ptr(), self.form
        if self.blocks_TB16 is not None:
            groups, blocks = self.values_TG16.shape[1], self.blocks_TB16.shape[1]
            w[f"{name}_blocks"], w[f"{name}_num_blocks"] = self.blocks_TB16.data_ptr(), blocks
            w[f"{name}_block_shift"] = (groups // blocks).bit_length() - 1


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight with its rows padded with zeros to a multiple of 32.

    Attributes:
        codes: bf16 [T, K / 32, 16, 16, 2]: tiles of pairs of inputs (AMX's layout of B); or uint8 [T, ..]
            (`code_tiles.py`).
        scales, shifts: of codes; shifts are zeros or offsets.
        following: further outputs in another form; all others are then a multiple of 32.
    """

    codes: Tensor
    in_features: int
    code: Code | None = None
    kernel: Task | None = None
    scales: _Shared | None = None
    shifts: _Shared | None = None
    following: PackedWeight | None = None

    @property
    def num_groups(self) -> int:
        """The groups of a row; the most of any row if they have several forms."""
        return max(part._num_groups for part in self._parts)

    @property
    def _num_groups(self) -> int:
        return 0 if self.scales is None else self.scales.values_TG16.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part._num_bytes for part in self._parts)

    @property
    def _parts(self) -> list[PackedWeight]:
        return [self, *([] if self.following is None else self.following._parts)]

    @property
    def _num_bytes(self) -> int:
        shared = [
            tensor for each in (self.scales, self.shifts) if each is not None for tensor in each.tensors
        ]
        return sum(tensor.nbytes for tensor in (self.codes, *shared))

    def rows(self, ids_N: Tensor) -> Tensor:
        """Return rows [N, K] of the weight, of codes, in bf16."""
        assert self.code is not None and self.scales is not None, "rows in bf16 are kept elsewhere"
        assert self.following is None, "a vocabulary has one form"
        tile_N, column_N = ids_N // 16, ids_N % 16
        codes_NK = _codes_of(self.codes, tile_N, column_N, BITS[self.code])
        shared = [
            None if each is None else each.rows(tile_N, column_N) for each in (self.scales, self.shifts)
        ]
        scales_NG, shifts_NG = shared
        assert scales_NG is not None, "codes have scales"
        has_offsets = self.code in WITH_OFFSETS
        matrix = QuantizedMatrix(
            self.code,
            codes_NK.view(torch.int8) if self.code == "int8" else codes_NK,
            scales_NG,
            None if has_offsets or not isinstance(shifts_NG, Tensor) else shifts_NG,
            shifts_NG if has_offsets else None,
        )
        return matrix.dequantized(torch.bfloat16)

    def interleaved(self) -> PackedWeight:
        """Interleave the outputs' two halves in groups of 16, as `project` requires for gate and up."""
        assert self.following is None, "gate and up have one form"
        return replace(
            self,
            codes=_interleaved(self.codes),
            scales=None if self.scales is None else self.scales.map(_interleaved),
            shifts=None if self.shifts is None else self.shifts.map(_interleaved),
        )

    def record(self, scratch_decoded: int) -> np.ndarray:
        """Return the WEIGHT of each part; the tensors must outlive them."""
        records_P, end = np.zeros(len(self._parts), dtype=WEIGHT), 0
        for w, part in zip(records_P, self._parts, strict=True):
            end += len(part.codes) // 2
            w["end"] = end
            part._write(w, scratch_decoded)
        return records_P

    def _write(self, w: np.void, scratch_decoded: int) -> None:
        w["codes"], w["tile_bytes"] = self.codes.data_ptr(), self.codes[0].nbytes
        if self.scales is None or self.kernel is None or self.code is None:
            return
        w["kernel"], w["scratch_decoded"] = self.kernel.address, scratch_decoded
        w["factor"] = FACTORS.get(self.code, 1.0)
        w["pairs"], w["groups"] = self.in_features // 2, self._num_groups
        self.scales.write(w, "scale")
        if self.shifts is not None:
            self.shifts.write(w, "shift")


def _interleaved(tiles: Tensor) -> Tensor:
    return tiles.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def can_pack_rows(weight_OK: JoinedRows) -> bool:
    """Return whether rows of several forms can be one weight, if their inputs can be packed."""
    parts = weight_OK.parts
    return len(parts) <= MOST_FORMS and all(len(part) % COLUMNS == 0 for part in parts[:-1])


def pack(weight_OK: Matrix | JoinedRows) -> PackedWeight:
    if isinstance(weight_OK, JoinedRows):
        assert can_pack_rows(weight_OK), "all parts but the last are whole panels"
        following = None
        for part in reversed(weight_OK.parts):
            following = replace(pack(part), following=following)
        assert following is not None, "there are parts"
        return following
    if isinstance(weight_OK, QuantizedMatrix):
        return _pack_codes(weight_OK)
    outputs, inputs = weight_OK.shape
    padded = F.pad(weight_OK, (0, 0, 0, -outputs % COLUMNS))
    pairs = padded.view(-1, 16, inputs // 32, 16, 2)
    return PackedWeight(pairs.permute(0, 2, 3, 1, 4).contiguous(), inputs)


def _pack_codes(matrix: QuantizedMatrix) -> PackedWeight:
    padding = (0, 0, 0, -len(matrix) % COLUMNS)  # with scales and offsets of 0, so that values are 0
    codes_TKC = F.pad(matrix.codes_OI, padding).unflatten(0, (-1, 16)).transpose(1, 2).contiguous()
    shifts = None
    if matrix.zeros_OG is not None:
        shifts = _Shared.of(matrix.zeros_OG, padding, _ZEROS)
    elif matrix.offsets_OG is not None:
        shifts = _Shared.of(matrix.offsets_OG, padding)
    return PackedWeight(
        _lines_of(codes_TKC.view(torch.uint8), BITS[matrix.code]),
        matrix.shape[1],
        matrix.code,
        _KERNELS[matrix.code, matrix.zeros_OG is not None],
        _Shared.of(matrix.scales_OG, padding),
        shifts,
    )


def _lines_of(codes_TKC: Tensor, bits: int) -> Tensor:
    """Return codes in the layout of `code_tiles.py`."""
    if bits == 8:
        return codes_TKC
    low = codes_TKC & 0xF
    lines_TPX = low[:, ::2] | low[:, 1::2] << 4
    if bits == 4:
        return lines_TPX
    planes_TK2C = torch.stack([codes_TKC >> bit & 1 for bit in range(4, bits)], dim=2)
    ones = torch.from_numpy(np.packbits(planes_TK2C.numpy(), axis=3, bitorder="little"))
    return torch.cat((lines_TPX, ones.flatten(2).unflatten(1, (-1, 2)).flatten(2)), dim=2)


def _codes_of(lines: Tensor, tile_N: Tensor, column_N: Tensor, bits: int) -> Tensor:
    """Return the codes [N, K] of columns, which `_lines_of` laid out."""
    codes_NX = lines[tile_N, :, column_N]
    if bits == 8:
        return codes_NX
    codes_NK = torch.stack((codes_NX & 0xF, codes_NX >> 4), dim=-1).flatten(1)
    for plane in range(bits - 4):
        at_N = 16 + 2 * plane + column_N // 8  # of the first of two inputs
        halves = [lines[tile_N, :, at_N + 2 * (bits - 4) * half] for half in (0, 1)]
        ones_NK = torch.stack(halves, dim=-1).flatten(1) >> (column_N % 8).to(torch.uint8).unsqueeze(1) & 1
        codes_NK |= ones_NK << 4 + plane
    return codes_NK


def _tiles_of(values_OG: Tensor) -> Tensor:
    return values_OG.unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def code_scratch_bytes(inputs: int, num_groups: int) -> int:
    """Return the scratch memory for a thread's expanded scales and shifts, and one panel of bf16."""
    return num_groups and 2 * MOST_TILES * num_groups * 64 + inputs // 32 * 2 * TILE_BYTES


@elements
def prepare_panels(w, panel, panels, step, scratch):
    """Expand scales and shifts of panels `panel`, `panel` + `step`, .. to fp32.

    Without AMX zeros become offsets.
    """
    size = 64 * w.groups
    scales = scratch + w.scratch_decoded
    shifts = scales + MOST_TILES * size
    for place in range(2 * panels):
        tile = 2 * (panel + place // 2 * step) + place % 2
        _expand(
            w.scales, w.scale_form, w.scale_blocks, w.scale_block_shift, w.scale_num_blocks,
            tile, w.groups, w.factor, scales + place * size,
        )  # fmt: skip
        if w.shifts != 0:
            _expand(
                w.shifts, w.shift_form, w.shift_blocks, w.shift_block_shift, w.shift_num_blocks,
                tile, w.groups, np.float32(1), shifts + place * size,
            )  # fmt: skip
            if w.shift_form == _ZEROS and not has_tiles():
                _subtract_zeros(scales + place * size, shifts + place * size, 16 * w.groups)


@elements
def _subtract_zeros(scales, shifts, size):
    """Replace zeros by the offsets that subtract them."""
    scales_1 = carray(pointer(scales, _FP32), (size,))
    shifts_1 = carray(pointer(shifts, _FP32), (size,))
    for i in range(size):
        shifts_1[i] *= -scales_1[i]


@elements
def _expand(values, form, blocks, block_shift, num_blocks, tile, groups, factor, target):
    """Write what the groups of a tile share, [G, 16] in a form, as fp32 times a factor."""
    size = groups * 16
    found = carray(pointer(target, _FP32), (size,))
    at = tile * size
    if form == _FP32_FORM:
        floats = carray(pointer(values + 4 * at, _FP32), (size,))
        for i in range(size):
            found[i] = floats[i] * factor
    elif form == _BF16_FORM:
        brains = carray(pointer(values + 2 * at, _BF16), (size,))
        for i in range(size):
            found[i] = float_of(brains[i]) * factor
    elif form == _FP16_FORM:
        widen_halves(values + 2 * at, target, groups)
        if factor != 1:
            for i in range(size):
                found[i] *= factor
    elif form == _EXPONENTS:
        exponents = carray(pointer(values + at, _BYTE), (size,))
        for i in range(size):
            found[i] = np.uint32(np.uint32(exponents[i]) << np.uint32(23)).view(np.float32) * factor
    elif form == _ZEROS:
        zeros = carray(pointer(values + at, _BYTE), (size,))
        for i in range(size):
            found[i] = np.float32(zeros[i]) - np.float32(8)
    else:
        of_tile = blocks + 32 * tile * num_blocks
        if form == _INT8_OF_BLOCKS:
            multiply_signed(values + at, of_tile, block_shift, groups, target)
        else:
            multiply_unsigned(values + at, of_tile, block_shift, groups, target)


@elements
def expand_panel(w, panel, step, scratch):
    """Expand a prepared panel to two tiles of bf16; return their address."""
    arguments = _arguments_memory()
    a = records(arguments, 1, ARGUMENTS)[0]
    take_codes(a, w, panel, scratch)
    a.target = scratch + w.scratch_decoded + 2 * MOST_TILES * w.groups * 64
    a.panel_bytes = 2 * w.tile_bytes * step
    call_task(w.kernel, arguments, EXPAND, 1)
    return a.target


@elements
def take_codes(a, w, panel, scratch):
    """Set what a product's ARGUMENTS have of a weight's prepared panels from `panel` on."""
    a.weight, a.tile_bytes = w.codes + 2 * panel * w.tile_bytes, w.tile_bytes
    a.pairs, a.groups = w.pairs, w.groups
    a.scales = scratch + w.scratch_decoded
    a.shifts = a.scales + MOST_TILES * w.groups * 64 if w.shifts != 0 else 0


_int8_product = code_product("int8")
_int4_product = code_product("int4")
_int4_zeros_product = code_product("int4", has_zeros=True)
_e4m3_product = code_product("e4m3")
_e2m1_product = code_product("e2m1")
_int5_product = code_product("int5")
_int6_product = code_product("int6")
_uint4_product = code_product("uint4")
_uint5_product = code_product("uint5")
_uint8_product = code_product("uint8")


# Tasks' code is cached on disk by their names, so each one is a function of its own.
def _multiply_int8(arguments, operation, _):
    _int8_product(arguments, operation)


def _multiply_int4(arguments, operation, _):
    _int4_product(arguments, operation)


def _multiply_int4_zeros(arguments, operation, _):
    _int4_zeros_product(arguments, operation)


def _multiply_e4m3(arguments, operation, _):
    _e4m3_product(arguments, operation)


def _multiply_e2m1(arguments, operation, _):
    _e2m1_product(arguments, operation)


def _multiply_int5(arguments, operation, _):
    _int5_product(arguments, operation)


def _multiply_int6(arguments, operation, _):
    _int6_product(arguments, operation)


def _multiply_uint5(arguments, operation, _):
    _uint5_product(arguments, operation)


def _multiply_uint4(arguments, operation, _):
    _uint4_product(arguments, operation)


def _multiply_uint8(arguments, operation, _):
    _uint8_product(arguments, operation)


_KERNELS = {
    ("int8", False): Task(_multiply_int8),
    ("int4", False): Task(_multiply_int4),
    ("int4", True): Task(_multiply_int4_zeros),
    ("e4m3", False): Task(_multiply_e4m3),
    ("e2m1", False): Task(_multiply_e2m1),
    ("int5", False): Task(_multiply_int5),
    ("int6", False): Task(_multiply_int6),
    ("uint4", False): Task(_multiply_uint4),
    ("uint5", False): Task(_multiply_uint5),
    ("uint8", False): Task(_multiply_uint8),
}
