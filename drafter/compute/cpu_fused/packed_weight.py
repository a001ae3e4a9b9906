"""Weights in the layouts that compiled products read: bf16, or codes with scales (`code_tiles.py`).

A compiled product takes the address of a WEIGHT. For codes, `prepare_panels` expands the scales of the
panels that are multiplied next to fp32, and `expand_panel` a whole panel to bf16.

Legend: O outputs, K inputs, G groups of inputs with a scale, T = O / 16 tiles of columns.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional as F

from ..checkpoint.quantized_matrix import Matrix, QuantizedMatrix
from ..cpu_numba.element_ops import Task, elements, float_of, pointer, record_dtype, records
from ..cpu_numba.llvm_intrinsics import call_task, stack_memory
from .tiles.amx_tiles import COLUMNS
from .tiles.code_tiles import CODE_ARGUMENTS, EXPAND, FACTORS, MULTIPLY, code_product
from .tiles.simd_tiles import TILE_BYTES

MOST_TILES = 8  # multiplied at once
_BF16, _FP32, _BYTE = np.uint16(0), np.float32(0), np.uint8(0)
# `kernel`: address of the task of a kind of codes, 0 for bf16; `group_shift`: log2 of a group's pairs;
# `scratch_decoded`: offset in a thread's scratch memory for what is expanded.
WEIGHT = record_dtype(
    "kernel codes tile_bytes scales scale_form zeros pairs group_shift groups scratch_decoded", "factor"
)
_ARGUMENTS = record_dtype(CODE_ARGUMENTS)
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
_NO_SHIFT = 62  # all pairs of inputs are in the first group
_arguments_memory = stack_memory(128)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight with its rows padded with zeros to a multiple of 32.

    Attributes:
        codes: bf16 [T, K / 32, 16, 16, 2]: tiles of pairs of inputs (AMX's layout of B); or uint8 [T, ..]
            (`code_tiles.py`).
        scales_TG16, zeros_TG16: of codes; scales as `QuantizedMatrix` has them, zeros uint8.
    """

    codes: Tensor
    in_features: int
    kernel: Task | None = None
    factor: float = 1.0
    scales_TG16: Tensor | None = None
    zeros_TG16: Tensor | None = None

    @property
    def num_groups(self) -> int:
        return 0 if self.scales_TG16 is None else self.scales_TG16.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(
            each.nbytes for each in (self.codes, self.scales_TG16, self.zeros_TG16) if each is not None
        )

    def interleaved(self) -> PackedWeight:
        """Interleave the outputs' two halves in groups of 16, as `project` requires for gate and up."""
        codes, scales, zeros = (
            None if each is None else each.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()
            for each in (self.codes, self.scales_TG16, self.zeros_TG16)
        )
        assert codes is not None, "a weight has codes"
        return replace(self, codes=codes, scales_TG16=scales, zeros_TG16=zeros)

    def record(self, scratch_decoded: int) -> np.ndarray:
        """Return the WEIGHT; the tensors must outlive it."""
        record_1 = np.zeros(1, dtype=WEIGHT)
        w = record_1[0]
        w["codes"], w["tile_bytes"] = self.codes.data_ptr(), self.codes[0].nbytes
        if self.scales_TG16 is None or self.kernel is None:
            return record_1
        w["kernel"], w["factor"], w["scratch_decoded"] = self.kernel.address, self.factor, scratch_decoded
        w["pairs"], w["groups"] = self.in_features // 2, self.num_groups
        pairs_of_group = self.in_features // self.num_groups // 2
        w["group_shift"] = pairs_of_group.bit_length() - 1 if self.num_groups > 1 else _NO_SHIFT
        w["scales"], w["scale_form"] = self.scales_TG16.data_ptr(), _FORMS[self.scales_TG16.dtype]
        w["zeros"] = 0 if self.zeros_TG16 is None else self.zeros_TG16.data_ptr()
        return record_1


def pack(weight_OK: Matrix) -> PackedWeight:
    if isinstance(weight_OK, QuantizedMatrix):
        return _pack_codes(weight_OK)
    outputs, inputs = weight_OK.shape
    padded = F.pad(weight_OK, (0, 0, 0, -outputs % COLUMNS))
    pairs = padded.view(-1, 16, inputs // 32, 16, 2)
    return PackedWeight(pairs.permute(0, 2, 3, 1, 4).contiguous(), inputs)


def _pack_codes(matrix: QuantizedMatrix) -> PackedWeight:
    padding = (0, 0, 0, -len(matrix) % COLUMNS)  # with scales of 0, so that values are 0
    codes_TKC = F.pad(matrix.codes_OI, padding).unflatten(0, (-1, 16)).transpose(1, 2)
    if matrix.code in ("int4", "e2m1"):
        codes_TKC = codes_TKC[:, ::2] | codes_TKC[:, 1::2] << 4
    return PackedWeight(
        codes_TKC.contiguous().view(torch.uint8),
        matrix.shape[1],
        _kernel(matrix),
        FACTORS[matrix.code],
        _tiles_of(F.pad(matrix.scales_OG, padding)),
        None if matrix.zeros_OG is None else _tiles_of(F.pad(matrix.zeros_OG, padding)),
    )


def _tiles_of(values_OG: Tensor) -> Tensor:
    return values_OG.unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def _kernel(matrix: QuantizedMatrix) -> Task:
    has_zeros = matrix.zeros_OG is not None
    bits = _SIGNIFICANT_BITS[matrix.code] + _significant_bits(matrix.scales())
    exact = _EXACT.get((matrix.code, has_zeros)) if bits <= 8 else None
    return exact or _ROUNDED[matrix.code, has_zeros]


_SIGNIFICANT_BITS = {"int8": 7, "int4": 3, "e4m3": 4, "e2m1": 2}  # of decoded codes


def _significant_bits(scales_OG: Tensor) -> int:
    """Return the most significant bits of any scale; bf16 has 8."""
    mantissas = scales_OG.contiguous().view(torch.int32).flatten() & 0x7FFFFF
    return next(24 - zeros for zeros in range(23, -1, -1) if not bool((mantissas & (2**zeros - 1)).any()))


def code_scratch_bytes(inputs: int, num_groups: int) -> int:
    """Return the scratch memory for a thread's expanded scales and zeros, and one panel of bf16."""
    return num_groups and 2 * MOST_TILES * num_groups * 64 + inputs // 32 * 2 * TILE_BYTES


@elements
def prepare_panels(w, panel, panels, step, scratch):
    """Expand scales and zeros of panels `panel`, `panel` + `step`, .. to fp32."""
    size = w.groups * 16
    target = scratch + w.scratch_decoded
    for tile in range(2 * panels):
        source = (2 * (panel + tile // 2 * step) + tile % 2) * size
        _expand_scales(w, source, target + 4 * tile * size, size)
        if w.zeros != 0:
            zeros = carray(pointer(w.zeros + source, _BYTE), (size,))
            found = carray(pointer(target + 4 * (MOST_TILES * size + tile * size), _FP32), (size,))
            for i in range(size):
                found[i] = np.float32(zeros[i]) - np.float32(8)


@elements
def _expand_scales(w, source, target, size):
    found = carray(pointer(target, _FP32), (size,))
    if w.scale_form == 0:
        floats = carray(pointer(w.scales + 4 * source, _FP32), (size,))
        for i in range(size):
            found[i] = floats[i] * w.factor
    elif w.scale_form == 1:
        brains = carray(pointer(w.scales + 2 * source, _BF16), (size,))
        for i in range(size):
            found[i] = float_of(brains[i]) * w.factor
    elif w.scale_form == 2:
        halves = carray(pointer(w.scales + 2 * source, _BF16), (size,))
        for i in range(size):
            found[i] = _float_of_half(halves[i]) * w.factor
    else:
        exponents = carray(pointer(w.scales + source, _BYTE), (size,))
        for i in range(size):
            found[i] = np.uint32(np.uint32(exponents[i]) << np.uint32(23)).view(np.float32) * w.factor


@elements
def _float_of_half(bits):
    """Return a finite fp16 as fp32: its exponent's bias is smaller by 112."""
    size = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    sign = np.uint32((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(size | sign).view(np.float32) * np.float32(2.0**112)


@elements
def expand_panel(w, panel, step, scratch):
    """Expand a prepared panel to two tiles of bf16; return their address."""
    arguments = _arguments_memory()
    a = records(arguments, 1, _ARGUMENTS)[0]
    _take_codes(a, w, panel, scratch)
    a.target, a.panel_bytes = a.zeros + 4 * MOST_TILES * w.groups * 16, 2 * w.tile_bytes * step
    call_task(w.kernel, arguments, EXPAND, 1)
    return a.target


@elements
def multiply_codes(packed, chunk_bytes, w, panel, step, scratch, rows, panels):
    """Compute sums [panels, rows, 32], as `simd_tiles.multiply_rows`, of prepared panels."""
    arguments = _arguments_memory()
    a = records(arguments, 1, _ARGUMENTS)[0]
    _take_codes(a, w, panel, scratch)
    a.a, a.chunk_bytes, a.panel_bytes = packed, chunk_bytes, 2 * w.tile_bytes * step
    a.sums, a.rows, a.panels = scratch, rows, panels
    call_task(w.kernel, arguments, MULTIPLY, 1)


@elements
def _take_codes(a, w, panel, scratch):
    a.codes, a.tile_bytes = w.codes + 2 * panel * w.tile_bytes, w.tile_bytes
    a.pairs, a.group_shift, a.groups = w.pairs, w.group_shift, w.groups
    a.scales = scratch + w.scratch_decoded
    a.zeros = a.scales + 4 * MOST_TILES * w.groups * 16


_int8_exact_product = code_product("int8", rounds=False)
_int4_exact_product = code_product("int4", rounds=False)
_int8_product = code_product("int8")
_int4_product = code_product("int4")
_int4_zeros_product = code_product("int4", has_zeros=True)
_e4m3_product = code_product("e4m3")
_e2m1_product = code_product("e2m1")


# Tasks' code is cached on disk by their names, so each one is a function of its own.
def _multiply_int8_exact(arguments, operation, _):
    _int8_exact_product(arguments, operation)


def _multiply_int4_exact(arguments, operation, _):
    _int4_exact_product(arguments, operation)


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


_EXACT = {("int8", False): Task(_multiply_int8_exact), ("int4", False): Task(_multiply_int4_exact)}
_ROUNDED = {
    ("int8", False): Task(_multiply_int8),
    ("int4", False): Task(_multiply_int4),
    ("int4", True): Task(_multiply_int4_zeros),
    ("e4m3", False): Task(_multiply_e4m3),
    ("e2m1", False): Task(_multiply_e2m1),
}
