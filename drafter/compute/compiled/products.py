"""Products of bf16 rows with packed weights, for CPUs with instructions for them (`loops/machine.py`).

oneDNN's call costs 20 to 30 microseconds whatever it computes; this one two, and a model's pass may call it
from compiled code (`one_pass.py`). A weight is read once, 32 columns at a time, for all rows; columns are
shared out among the threads. One order of sums for every row, whatever stands beside it: batch-invariant.

Legend: N rows, K inputs, O outputs.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor
from torch.nn import functional as F

from ..loops.elements import Task, elements, float_of, pointer, rounded
from ..loops.llvm import stack_memory
from .instructions import COLUMNS, ROWS, SUMS_STRIDE, begin_products, end_products, multiply
from .team import process_team, run
from .tiles import TILE_BYTES
from .vectors import finish, finish_added, finish_gated

_CACHE_BYTES = 2**19
SUMS_BYTES = ROWS * SUMS_STRIDE
_BF16, _FP32 = np.uint16(0), np.float32(0)
_args_memory, _sums_memory = stack_memory(64), stack_memory(SUMS_BYTES)


class PackedLinear:
    """`layers.Linear` of bf16 where `can_pack` says so: summed in fp32, rounded once.

    Attributes:
        tiles: the weight, [O / 16, K / 32, 16, 16, 2]: per 16 outputs and 32 inputs a tile of pairs of
            inputs. Rows of zeros are added until O is a multiple of 32.
    """

    __slots__ = ("_num_threads", "bias_O", "in_features", "out_features", "tiles")

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None, num_threads: int) -> None:
        self.out_features, self.in_features = weight_OK.shape
        self.bias_O = bias_O
        self._num_threads = num_threads
        padded = F.pad(weight_OK, (0, 0, 0, -self.out_features % COLUMNS))
        pairs = padded.view(-1, 16, self.in_features // 32, 16, 2)
        self.tiles = pairs.permute(0, 2, 3, 1, 4).contiguous()

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        x_NK = x_NK.contiguous()
        residual_NO = None if residual_NO is None else residual_NO.contiguous()  # kept until it is read
        y_NO = x_NK.new_empty(len(x_NK), self.out_features)
        _run_product(
            process_team().of(self._num_threads),
            _PRODUCT.address,
            self._num_threads,
            x_NK.data_ptr(),
            self.tiles.data_ptr(),
            0 if self.bias_O is None else self.bias_O.data_ptr(),
            0 if residual_NO is None else residual_NO.data_ptr(),
            y_NO.data_ptr(),
            len(x_NK),
            self.in_features,
            self.out_features,
        )
        return y_NO


def can_pack(num_inputs: int) -> bool:
    """Whether the tiles fit a weight of so many inputs."""
    return num_inputs % 32 == 0


def halves_taking_turns(tiles: Tensor) -> Tensor:
    """The outputs' two halves in turns of 16: what `project` wants of a gate and an up projection."""
    return tiles.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


@elements
def _run_product(team, task, num_threads, x, weight, bias, residual, y, num_rows, inputs, outputs):
    args = _args_memory()
    a = carray(pointer(args, np.int64(0)), (8,))
    a[0], a[1], a[2], a[3], a[4] = x, weight, bias, residual, y
    a[5], a[6], a[7] = num_rows, inputs, outputs
    run(team, task, args, num_threads)


def _product_task(args, thread, num_threads):
    a = carray(pointer(args, np.int64(0)), (8,))
    sums = _sums_memory()
    begin_products(min(a[5], 16))
    panels = (a[7] + COLUMNS - 1) // COLUMNS
    project(a[0], a[1], a[2], a[3], a[4], a[5], a[5], a[6], a[7], False, sums, thread, panels, num_threads)
    end_products()


@elements
def _block_of_rows(begin, end, room):
    """The block of rows at `begin`: where it starts, and its rows; whole blocks wherever there is room.

    A last block that would be short starts earlier, over rows that are done: they come out the same.
    """
    left = room - begin
    if left >= ROWS and end - begin > 16:
        return begin, ROWS
    if left >= 16:
        return begin, 16
    return (room - 16, 16) if room > 16 else (begin, left)


@elements
def _rows_in_cache(inputs):
    """Rows of x that stay in a core's cache while panels of the weight go by."""
    return max(_CACHE_BYTES // (2 * inputs) // ROWS, 1) * ROWS


@elements
def project(
    x, weight, bias, residual, y, num_rows, room, inputs, outputs, gated, sums, first_panel, last_panel, step
):  # fmt: skip
    """Some columns of y = x W^T (+ bias) (+ residual), or of silu(gate) * up.

    Args:
        num_rows, room: rows that count, and rows of x that may be read. `residual` may be `y` if the room is
            a multiple of 16.
        outputs: of the weight; rows of y are as long, or half of it if gated.
        gated: weight and bias hold 16 of gate, 16 of up, and so on; there is no residual.
        sums: address of SUMS_BYTES.
        first_panel, last_panel, step: which panels of 32 columns.
    """
    blocks = inputs // 32
    panel_bytes = blocks * TILE_BYTES
    x_stride = inputs * 2
    sums_1 = carray(pointer(sums, _FP32), (ROWS * COLUMNS,))
    for start in range(0, num_rows, _rows_in_cache(inputs)):
        end = min(start + _rows_in_cache(inputs), num_rows)
        for panel in range(first_panel, last_panel, step):
            column = panel * COLUMNS
            width = min(COLUMNS, outputs - column)
            tiles = weight + 2 * panel * panel_bytes
            begin = start
            while begin < end:
                first, rows = _block_of_rows(begin, end, room)
                multiply(x + first * x_stride, x_stride, tiles, panel_bytes, sums, blocks, rows)
                last = min(first + rows, end)
                if bias != 0:
                    _add_bias(sums_1, bias + 2 * column, last - first, width)
                for n in range(first, last):
                    row, at = sums + (n - first) * SUMS_STRIDE, 2 * (n * outputs + column)
                    if gated:
                        finish_gated(row, y + at // 2)
                    elif width < COLUMNS:
                        _finish_narrow(row, residual + at if residual != 0 else 0, y + at, width)
                    elif residual != 0:
                        finish_added(row, residual + at, y + at)
                    else:
                        finish(row, y + at)
                begin = first + rows


@elements
def _finish_narrow(sums, residual, y, width):
    """A row of a last panel that is not whole."""
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
    for n in range(rows):
        for j in range(width):
            sums[n * COLUMNS + j] += float_of(bias_O[j])


_PRODUCT = Task(_product_task)
