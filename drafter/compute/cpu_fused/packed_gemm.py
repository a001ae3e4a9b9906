"""Products of bf16 rows with packed weights (GEMM), for CPUs of `compute/cpu_numba/cpu_features.py`.

A oneDNN call has 20 to 30 microseconds of overhead; this one two (`operators.PackedLinear`), and it is
callable from compiled code (`fused_forward.py`). A weight is read once, 32 columns at a time, for all rows;
threads share the columns. Every row has the same order of sums: batch-invariant.

Legend: N rows, K inputs, O outputs.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu_numba.element_ops import Task, elements, pointer
from ..cpu_numba.llvm_intrinsics import stack_memory
from .amx_gemm import project_tiles
from .gemm_epilogues import PLAIN
from .packed_weight import code_scratch_bytes
from .simd_gemm import SUMS_BYTES, fit_at_once, packed_bytes, panels_per_turn, project_rows
from .threads.shared_items import state_of, states_per_thread
from .threads.thread_team import (
    arrive,
    barrier,
    end_phase,
    ends_soon,
    first_phase,
    has_ended,
    item_states,
    run,
)
from .tiles.amx_tiles import COLUMNS, ROWS, SUMS_STRIDE, begin_products, end_products
from .tiles.isa_dispatch import has_tiles, of_two_kinds

_TILE_SUMS_BYTES = ROWS * SUMS_STRIDE
_NUM_ARGS = 11
_args_memory = stack_memory(128)


def can_pack(num_inputs: int) -> bool:
    return num_inputs % 32 == 0


def scratch_bytes(inputs: int, num_groups: int = 0) -> int:
    """Return the scratch memory of `project` per thread, in bytes, for any number of rows.

    `num_groups`: groups of inputs that share a scale; 0 for a weight in bf16.
    """
    return decoded_offset(inputs) + code_scratch_bytes(inputs, num_groups)


def decoded_offset(inputs: int) -> int:
    """Return the offset of what is expanded from codes in a thread's scratch memory."""
    return _TILE_SUMS_BYTES if has_tiles() else SUMS_BYTES + packed_bytes(inputs)


@elements
def run_product(
    team, task, num_threads, x, weight, bias, residual, y, num_rows, inputs, outputs, scratch, each
):
    args = _args_memory()
    a = carray(pointer(args, np.int64(0)), (_NUM_ARGS,))
    a[0], a[1], a[2], a[3], a[4] = x, weight, bias, residual, y
    a[5], a[6], a[7], a[8], a[9], a[10] = num_rows, inputs, outputs, scratch, each, team
    run(team, task, args, num_threads)


def _product_task(args, thread, num_threads):
    a = carray(pointer(args, np.int64(0)), (_NUM_ARGS,))
    sums = a[8] + thread * a[9]
    begin_products(min(a[5], 16))
    project_together(
        a[10], thread, num_threads, first_phase(a[10]), a[0], a[1], a[2], a[3], a[4], a[5], a[5], a[6], a[7],
        PLAIN, sums,
    )  # fmt: skip
    end_products()


@elements
def project_together(
    team, thread, num_threads, phase, x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending,
    sums,
):  # fmt: skip
    """Compute a product on all threads of a task, and wait for its end; return the next phase.

    Threads have every `num_threads`-th panel. One that has finished computes those of late threads.
    """
    panels = (outputs + COLUMNS - 1) // COLUMNS
    words = 0
    if num_threads > 1 and not has_tiles() and fit_at_once(num_rows, inputs):
        words = states_per_thread(panels, num_threads)
    all_states = item_states(team) if words > 0 else 0
    project(
        x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums,
        state_of(all_states, words * thread), phase, thread, panels, num_threads,
    )  # fmt: skip
    if words == 0:
        return barrier(team, num_threads, phase)
    arrive(team, num_threads, phase)
    if not ends_soon(team, phase):
        turn = panels_per_turn(num_rows)
        for k in range(1, num_threads):
            late = (thread + k) % num_threads
            count = (panels - late + num_threads - 1) // num_threads
            turns = (count + turn - 1) // turn
            for i in range(turns):
                if has_ended(team, phase):
                    break
                # From the last one down, and helpers of a thread begin at different ones.
                begin = turn * (turns - 1 - (i + num_threads - k - 1) % turns)
                project(
                    x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums,
                    state_of(all_states, words * late + begin), phase, late + begin * num_threads,
                    min(late + (begin + turn) * num_threads, panels), num_threads,
                )  # fmt: skip
        end_phase(team, phase)
    return phase + 1


def project(
    x, weight, bias, residual, y, num_rows, room, inputs, outputs, ending, sums, states, phase,
    first_panel, last_panel, step,
):  # fmt: skip
    """Compute some columns of y = x W^T (+ bias) (+ residual), or of activation(gate) * up.

    Args:
        weight: address of a `packed_weight.WEIGHT`.
        num_rows, room: rows to compute, and rows of x that may be read. `residual` may be `y` if `room` is
            a multiple of 16.
        outputs: of the weight; rows of y are as long, or half as long with an activation.
        ending: PLAIN, SILU or GELU. With an activation weight and bias alternate 16 columns of gate and 16 of
            up, and there is no residual.
        sums: address of `scratch_bytes` bytes.
        states, phase: states of these panels in the present phase (`threads/shared_items.py`), for rows that
            `fit_at_once`; 0 if the caller alone computes them. Not with AMX.
        first_panel, last_panel, step: which panels of 32 columns.
    """


of_two_kinds(project, project_tiles, project_rows)
PRODUCT = Task(_product_task)
