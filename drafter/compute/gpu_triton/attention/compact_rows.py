"""Moves rows of K/V within their planes in one launch: the accepted path of a draft tree.

A program moves some columns of all moves of a request in one plane: it reads all rows before it writes one.

Legend: R requests, M most moves of a request.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.kv_cache import PagedKVCache
from ..common.element_ops import dependent_launch, wait_for_predecessor

_TILE_VALUES, _MAX_MOVES = 2048, 256
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def compact_rows(cache: PagedKVCache, source_slots_RM: Tensor, target_slots_RM: Tensor) -> None:
    """Move rows as `PagedKVCache.compact_rows` does, within each request; a single row of slots is one.

    Requests have no slots in common. A slot that moves to itself is not read.
    """
    source_slots_RM, target_slots_RM = (torch.atleast_2d(x) for x in (source_slots_RM, target_slots_RM))
    assert source_slots_RM.shape == target_slots_RM.shape, "a target for each source"
    assert source_slots_RM.is_contiguous() and target_slots_RM.is_contiguous(), "as the kernel reads them"
    num_requests, moves = source_slots_RM.shape
    assert 0 < moves <= _MAX_MOVES, f"a request moves up to {_MAX_MOVES} rows at once"
    planes, _, _, width = cache.kv.shape
    places = triton.next_power_of_2(moves)
    columns = min(_TILE_VALUES // places, triton.next_power_of_2(width))
    _compact[(num_requests, triton.cdiv(width, columns), planes)](
        cache.kv.view(_AS_INTEGERS[cache.dtype.itemsize]), source_slots_RM, target_slots_RM, moves,
        cache.kv.stride(0), WIDTH=width, MOVES=places, COLUMNS=columns, **dependent_launch(cache.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "moves"])
def _compact(
    kv_ptr, source_ptr, target_ptr, moves, plane_stride,
    WIDTH: tl.constexpr, MOVES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    move_M = tl.arange(0, MOVES)
    at_M = tl.program_id(0) * moves + move_M
    source_M = tl.load(source_ptr + at_M, mask=move_M < moves, other=0).to(tl.int64)
    target_M = tl.load(target_ptr + at_M, mask=move_M < moves, other=0).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_MC = (source_M != target_M)[:, None] & (column_C < WIDTH)[None, :]
    plane_ptr = kv_ptr + tl.program_id(2).to(tl.int64) * plane_stride + column_C[None, :]
    row_MC = tl.load(plane_ptr + source_M[:, None] * WIDTH, mask=there_MC, other=0)
    tl.debug_barrier()  # a target may be another row's source
    tl.store(plane_ptr + target_M[:, None] * WIDTH, row_MC, mask=there_MC)
