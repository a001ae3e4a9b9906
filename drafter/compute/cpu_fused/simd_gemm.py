"""Products of rows with a packed weight in vector registers; a variant of `packed_gemm.project`.

As many rows as fit a core's cache are packed first; then each panel of the weight is multiplied with all of
them. With few rows several panels are processed at once, to have enough independent sums to hide the latency
of an addition. Codes are decoded in registers where a panel is multiplied once, and expanded first where it
is multiplied with several tiles of rows.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from ..cpu_numba.element_ops import elements, records
from .gemm_epilogues import finish_panel
from .packed_weight import MOST_FORMS, WEIGHT, expand_panel, multiply_codes, prepare_panels
from .tiles.amx_tiles import COLUMNS, SUMS_STRIDE
from .tiles.simd_tiles import (
    CHUNK,
    TILE_BYTES,
    most_rows,
    multiply_rows,
    pack_rows,
    packed_row_bytes,
    panels_at_once,
)

_CACHE_BYTES = 2**18
_EVEN_ROWS = 12  # a multiple of every CPU kind's highest tile
SUMS_BYTES = _EVEN_ROWS * SUMS_STRIDE


def packed_bytes(inputs: int) -> int:
    """Return the memory that `project_rows` needs after SUMS_BYTES, in bytes."""
    chunks, row_bytes = -(-inputs // CHUNK), packed_row_bytes()
    return max(_CACHE_BYTES // (chunks * row_bytes) // _EVEN_ROWS, 1) * _EVEN_ROWS * chunks * row_bytes


@elements
def _rows_at_once(inputs):
    """Return how many packed rows stay in a core's cache while panels of the weight stream by."""
    row_bytes = (inputs + CHUNK - 1) // CHUNK * packed_row_bytes()
    return max(_CACHE_BYTES // row_bytes // _EVEN_ROWS, 1) * _EVEN_ROWS


def project_rows(
    x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums, first_panel, last_panel, step
):  # fmt: skip
    """Compute some columns of a product; arguments: see `packed_gemm.project`."""
    packed = sums + SUMS_BYTES
    for start in range(0, num_rows, _rows_at_once(inputs)):
        count = min(_rows_at_once(inputs), num_rows - start)
        chunk_bytes = count * packed_row_bytes()
        pack_rows(x + 2 * start * inputs, 2 * inputs, packed, chunk_bytes, count, inputs)
        parts = (count + most_rows() - 1) // most_rows()
        panel, form, begin = first_panel, 0, 0
        w = records(weight, MOST_FORMS, WEIGHT)[0]
        while panel < last_panel:
            while panel >= w.end:
                form, begin = form + 1, w.end
                w = records(weight, MOST_FORMS, WEIGHT)[form]
            panels = panels_at_once(count) if parts == 1 else 1
            while panel + (panels - 1) * step >= min(last_panel, w.end):
                panels //= 2
            of_form = panel - begin
            tiles, tile_bytes = w.codes + 2 * of_form * w.tile_bytes, inputs // 32 * TILE_BYTES
            if w.kernel != 0:
                prepare_panels(w, of_form, panels, step, sums)
                if parts > 1:
                    tiles = expand_panel(w, of_form, step, sums)
            for part in range(parts):
                first, last = count * part // parts, count * (part + 1) // parts
                rows = last - first
                if w.kernel != 0 and parts == 1:
                    multiply_codes(packed, chunk_bytes, w, of_form, step, sums, rows, panels)
                else:
                    multiply_rows(
                        packed + first * packed_row_bytes(), chunk_bytes, tiles, tile_bytes,
                        2 * tile_bytes * step, sums, inputs // 2, rows, panels,
                    )  # fmt: skip
                for j in range(panels):
                    finish_panel(
                        sums + j * rows * SUMS_STRIDE, start + first, start + last,
                        (panel + j * step) * COLUMNS, outputs, ending, bias, residual, y,
                    )  # fmt: skip
            panel += panels * step
