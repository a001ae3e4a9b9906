"""Products of many rows with a packed weight, in AMX tiles of 16 rows; a variant of `packed_gemm.project`.

Legend: K inputs, O outputs.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ..cpu_numba.element_ops import elements, records
from .gemm_epilogues import finish_panel
from .packed_weight import MOST_FORMS, WEIGHT, expand_panel, prepare_panels
from .tiles.amx_intrinsics import TILE_BYTES
from .tiles.amx_tiles import COLUMNS, ROWS, multiply

_CACHE_BYTES = 2**19


@elements
def _block_of_rows(begin, end, room):
    """Return start and length of the block of rows at `begin`, of full height if there is room.

    A last block that would be short starts earlier and recomputes finished rows, with the same result.
    """
    left = room - begin
    if left >= ROWS and end - begin > 16:
        return begin, ROWS
    if left >= 16:
        return begin, 16
    return (room - 16, 16) if room > 16 else (begin, left)


@elements
def _rows_in_cache(inputs):
    """Return how many rows of x stay in a core's cache while panels of the weight stream by."""
    return max(_CACHE_BYTES // (2 * inputs) // ROWS, 1) * ROWS


def project_tiles(
    x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums, states, phase,
    first_panel, last_panel, step,
):  # fmt: skip
    """Compute some columns of a product; arguments: see `packed_gemm.project`."""
    blocks = inputs // 32
    panel_bytes = blocks * TILE_BYTES
    x_stride = inputs * 2
    for start in range(0, num_rows, _rows_in_cache(inputs)):
        end = min(start + _rows_in_cache(inputs), num_rows)
        form, first_of_form = 0, 0
        w = records(weight, MOST_FORMS, WEIGHT)[0]
        for panel in range(first_panel, last_panel, step):
            while panel >= w.end:
                form, first_of_form = form + 1, w.end
                w = records(weight, MOST_FORMS, WEIGHT)[form]
            column, of_form = panel * COLUMNS, panel - first_of_form
            tiles = w.codes + 2 * of_form * w.tile_bytes
            if w.kernel != 0:
                prepare_panels(w, of_form, 1, 1, sums)
                tiles = expand_panel(w, of_form, step, sums)
            begin = start
            while begin < end:
                first, rows = _block_of_rows(begin, end, room)
                multiply(x + first * x_stride, x_stride, tiles, panel_bytes, sums, blocks, rows)
                last = min(first + rows, end)
                finish_panel(sums, first, last, column, outputs, ending, bias, residual, y)
                begin = first + rows
