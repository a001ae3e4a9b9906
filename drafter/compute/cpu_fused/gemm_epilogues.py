"""Epilogues of packed products: bias, residual or gate, and one rounding to bf16.

Called by `amx_gemm.py` and `simd_gemm.py`.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu_numba.element_ops import elements, float_of, pointer, rounded
from .tiles.amx_tiles import COLUMNS, SUMS_STRIDE
from .tiles.simd_vectors import finish, finish_added, finish_gelu, finish_silu

_BF16, _FP32 = np.uint16(0), np.float32(0)

# How a product ends: as it is, or with the activation of its gate.
PLAIN, SILU, GELU = 0, 1, 2


@elements
def finish_panel(sums, first, last, column, outputs, ending, bias, residual, y):
    """Finish rows [first, last) of a panel of y at `column`; see `packed_gemm.project`."""
    width = min(COLUMNS, outputs - column)
    if bias != 0:
        _add_bias(sums, bias + 2 * column, last - first, width)
    for n in range(first, last):
        row, at = sums + (n - first) * SUMS_STRIDE, 2 * (n * outputs + column)
        if ending == SILU:
            finish_silu(row, y + at // 2)
        elif ending == GELU:
            finish_gelu(row, y + at // 2)
        elif width < COLUMNS:
            _finish_narrow(row, residual + at if residual != 0 else 0, y + at, width)
        elif residual != 0:
            finish_added(row, residual + at, y + at)
        else:
            finish(row, y + at)


@elements
def _finish_narrow(sums, residual, y, width):
    sums_C = carray(pointer(sums, _FP32), (width,))
    y_C = carray(pointer(y, _BF16), (width,))
    for j in range(width):
        value = sums_C[j]
        if residual != 0:
            value += float_of(carray(pointer(residual, _BF16), (width,))[j])
        y_C[j] = rounded(value, _BF16)


@elements
def _add_bias(sums, bias, rows, width):
    bias_O = carray(pointer(bias, _BF16), (width,))
    sums_1 = carray(pointer(sums, _FP32), (rows * COLUMNS,))
    for n in range(rows):
        for j in range(width):
            sums_1[n * COLUMNS + j] += float_of(bias_O[j])
