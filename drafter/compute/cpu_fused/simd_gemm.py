"""Products of rows with a packed weight in vector registers; a variant of `packed_gemm.project`.

As many rows as fit a core's cache are packed first; then each panel of the weight is multiplied with all of
them. With few rows several panels are processed at once, to have enough independent sums to hide the latency
of an addition. Codes are decoded in registers where a panel is multiplied once, and expanded first where it
is multiplied with several tiles of rows; both give the same sums.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ..checkpoint.quantized_matrix import SMALLEST_GROUP
from ..cpu_numba.element_ops import elements, records
from ..cpu_numba.llvm_intrinsics import call_task, stack_memory
from .gemm_epilogues import finish_panel
from .packed_weight import MOST_FORMS, WEIGHT, expand_panel, prepare_panels, take_codes
from .threads.shared_items import claim, is_complete, publish, state_of
from .tiles.amx_tiles import COLUMNS, SUMS_STRIDE
from .tiles.code_tiles import MULTIPLY
from .tiles.simd_tiles import (
    ARGUMENTS,
    CHUNK,
    TILE_BYTES,
    most_rows,
    multiply_rows,
    pack_rows,
    packed_row_bytes,
    panels_at_once,
)
from .tiles.simd_vectors import sum_groups

_CACHE_BYTES = 2**18
_EVEN_ROWS = 12  # a multiple of every CPU kind's highest tile
SUMS_BYTES = _EVEN_ROWS * SUMS_STRIDE
_arguments_memory = stack_memory(128)


def packed_bytes(inputs: int) -> int:
    """Return the memory that `project_rows` needs after SUMS_BYTES, in bytes: for rows and sums of groups."""
    chunks, row_bytes = -(-inputs // CHUNK), packed_row_bytes()
    rows = max(_CACHE_BYTES // (chunks * row_bytes) // _EVEN_ROWS, 1) * _EVEN_ROWS
    return rows * (chunks * row_bytes + 4 * (inputs // SMALLEST_GROUP))


@elements
def _rows_at_once(inputs):
    """Return how many packed rows stay in a core's cache while panels of the weight stream by."""
    row_bytes = (inputs + CHUNK - 1) // CHUNK * packed_row_bytes()
    return max(_CACHE_BYTES // row_bytes // _EVEN_ROWS, 1) * _EVEN_ROWS


@elements
def fit_at_once(num_rows, inputs):
    """Return whether a panel is finished before the next one is begun."""
    return num_rows <= _rows_at_once(inputs)


@elements
def panels_per_turn(num_rows):
    return panels_at_once(num_rows) if num_rows <= most_rows() else 1


def project_rows(
    x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums, states, phase,
    first_panel, last_panel, step,
):  # fmt: skip
    """Compute some columns of a product; arguments: see `packed_gemm.project`."""
    arguments = _arguments_memory()
    a = records(arguments, 1, ARGUMENTS)[0]
    packed = sums + SUMS_BYTES
    row_sums = packed + _rows_at_once(inputs) * ((inputs + CHUNK - 1) // CHUNK) * packed_row_bytes()
    for start in range(0, num_rows, _rows_at_once(inputs)):
        count = min(_rows_at_once(inputs), num_rows - start)
        source = x + 2 * start * inputs
        a.sums, a.chunk_bytes, a.row_sums_bytes = sums, count * packed_row_bytes(), 4 * count
        pack_rows(source, 2 * inputs, packed, a.chunk_bytes, count, inputs)
        parts = (count + most_rows() - 1) // most_rows()
        panel, form, begin, summed = first_panel, 0, 0, -1
        w = records(weight, MOST_FORMS, WEIGHT)[0]
        while panel < last_panel:
            if is_complete(state_of(states, (panel - first_panel) // step), phase):
                panel += step
                continue
            while panel >= w.end:
                form, begin = form + 1, w.end
                w = records(weight, MOST_FORMS, WEIGHT)[form]
            panels = panels_at_once(count) if parts == 1 else 1
            while panel + (panels - 1) * step >= min(last_panel, w.end):
                panels //= 2
            if w.shifts != 0 and summed != form:
                sum_groups(source, 2 * inputs, row_sums, count, w.groups, inputs // w.groups)
                summed = form
            decodes = w.kernel != 0 and parts == 1
            if w.kernel != 0:
                prepare_panels(w, panel - begin, panels, step, sums)
                take_codes(a, w, panel - begin, sums)
            else:
                a.weight, a.tile_bytes = w.codes + 2 * (panel - begin) * w.tile_bytes, w.tile_bytes
                a.pairs, a.groups, a.scales, a.shifts = inputs // 2, 1, 0, 0
            if w.kernel != 0 and not decodes:
                a.weight, a.tile_bytes = expand_panel(w, panel - begin, step, sums), inputs // 32 * TILE_BYTES
            a.panel_bytes, a.panels = 2 * a.tile_bytes * step, panels
            for part in range(parts):
                first, last = count * part // parts, count * (part + 1) // parts
                rows = last - first
                a.a, a.row_sums, a.rows = packed + first * packed_row_bytes(), row_sums + 4 * first, rows
                if decodes:
                    call_task(w.kernel, arguments, MULTIPLY, 1)
                else:
                    multiply_rows(arguments)
                for j in range(panels):
                    state = state_of(states, (panel - first_panel) // step + j)
                    if claim(state, phase, part):
                        finish_panel(
                            sums + j * rows * SUMS_STRIDE, start + first, start + last,
                            (panel + j * step) * COLUMNS, outputs, ending, bias, residual, y,
                        )  # fmt: skip
                        publish(state, phase, part, parts)
            panel += panels * step
