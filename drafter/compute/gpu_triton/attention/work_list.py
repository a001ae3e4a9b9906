"""What there is to do in an attention call, listed on the device: which programs take which part of whom.

A *pair* is a tile of a request's rows and a piece of its keys; pairs times kv heads are the items that
`paged_attention.py`'s programs share. Pieces have one length per call and begin at multiples of it, so that a
context of 32k among 31 short ones is many items as long as theirs. The length is chosen here, from the
lengths of this step: the one with the shortest estimated time, counted in keys that a program reads:

    rounds of all programs * (keys of an item + its fixed cost + write and read of its partial result)

Whole contexts win where requests fill the device, pieces of 128 keys where there is one of a thousand keys.
In batch-invariant mode there are three lengths to choose from: a split, a run of splits, all; sums are made
of splits and runs in any case (`paged_attention.py`), so that bits do not tell which it was.

One program, launched once per pass for all layers of a kind (`drafter/compute/gpu_triton/backend.py`); the
host knows nothing of it.

    work    piece length | pieces of a run | pairs before each request, and all | shared pairs before each

Legend: B requests (of a part of all), J lengths to choose from.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import dependent_launch, wait_for_predecessor
from .attention_tiles import (
    MIN_PIECE_TILES,
    AttentionKind,
    AttentionWorkspace,
    PagedRows,
    TilePlan,
    plan_tiles,
)

HEADER = tl.constexpr(2)  # numbers before the lists
_REQUESTS = tl.constexpr(64)  # of one turn
_LENGTHS = tl.constexpr(32)
_ITEM_KEYS = tl.constexpr(64)  # what an item costs beside its keys: its rows, the first wait for memory
_ALL_KEYS = tl.constexpr(2**30)
_MIN_TILES = tl.constexpr(MIN_PIECE_TILES)


@dataclass(frozen=True, slots=True)
class WorkList:
    """A pass's work for layers of one kind.

    Attributes:
        values: int32, on the device; see the module's text.
        num_programs: to launch.
    """

    kind: AttentionKind
    plan: TilePlan
    workspace: AttentionWorkspace
    values: Tensor
    num_programs: int


def list_work(kind: AttentionKind, rows: PagedRows, workspace: AttentionWorkspace) -> WorkList:
    """One launch; the tensors of `rows` need not be known to the host."""
    num_requests = len(rows.slots_B)
    max_rows = min(rows.max_rows, kind.most_rows)
    plan = plan_tiles(kind, max_rows, batch_invariant=workspace.batch_invariant)
    max_keys = rows.page_table.shape[1] * kind.page_size
    most = plan.num_programs(num_requests, max_rows, kind.num_kv_heads, max_keys)
    values = torch.empty(HEADER.value + 2 * num_requests + 1, dtype=torch.int32, device=rows.cu_rows.device)
    _list_work[(1,)](
        rows.cu_rows,
        rows.kv_lengths_B,
        values,
        num_requests,
        workspace.num_programs,
        workspace.num_slots(plan.block_rows),
        kind.most_rows,
        KV_HEADS=kind.num_kv_heads,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KEYS=plan.block_keys,
        TILE_TOKENS=plan.tile_tokens,
        WINDOW=kind.window or 0,
        SPLIT_KEYS=plan.split_keys,
        RUN_SPLITS=plan.run_splits,
        **dependent_launch(values.device),
    )
    return WorkList(kind, plan, workspace, values, min(most, workspace.num_programs))


@triton.jit(
    do_not_specialize=[
        "cu_rows_ptr",
        "kv_lengths_ptr",
        "num_requests",
        "num_programs",
        "num_slots",
        "most_rows",
    ]
)
def _list_work(
    cu_rows_ptr,
    kv_lengths_ptr,
    work_ptr,
    num_requests,
    num_programs,
    num_slots,
    most_rows,
    KV_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    RUN_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    length_J = _lengths(BLOCK_KEYS, SPLIT_KEYS, RUN_SPLITS)
    pairs_J = tl.zeros([_LENGTHS], tl.int32)
    shared_J = tl.zeros([_LENGTHS], tl.int32)
    longest = 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        tiles_B, first_B, last_B = _requests(
            cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows, TILE_TOKENS, WINDOW
        )
        pieces_BJ = count_pieces(first_B[:, None], last_B[:, None], length_J[None, :])
        pairs_BJ = tiles_B[:, None] * pieces_BJ
        pairs_J += tl.sum(pairs_BJ, 0)
        shared_J += tl.sum(tl.where(pieces_BJ > 1, pairs_BJ, 0), 0)
        longest = tl.maximum(longest, tl.max(tl.where(tiles_B > 0, last_B - first_B + 1, 0), 0))
    rounds_J = tl.cdiv(pairs_J * KV_HEADS, num_programs).to(tl.float32)
    partial_J = tl.where(shared_J > 0, 2 * BLOCK_ROWS, 0)  # fp32 for K and V in half precision
    cost_J = rounds_J * (tl.minimum(length_J, longest) + _ITEM_KEYS + partial_J)
    cost_J = tl.where(shared_J * KV_HEADS <= num_slots, cost_J, float("inf"))
    length = tl.min(tl.where(cost_J == tl.min(cost_J, 0), length_J, _ALL_KEYS), 0)
    tl.store(work_ptr, length)
    tl.store(work_ptr + 1, _run_pieces(length, longest, SPLIT_KEYS, RUN_SPLITS))
    before_ptr = work_ptr + HEADER
    before, shared_before = 0, 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        tiles_B, first_B, last_B = _requests(
            cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows, TILE_TOKENS, WINDOW
        )
        pieces_B = count_pieces(first_B, last_B, length)
        pairs_B = tiles_B * pieces_B
        shared_B = tl.where(pieces_B > 1, pairs_B, 0)
        there_B = request_B < num_requests
        tl.store(before_ptr + request_B, before + tl.cumsum(pairs_B, 0) - pairs_B, mask=there_B)
        shared_ptr = before_ptr + num_requests + 1
        tl.store(shared_ptr + request_B, shared_before + tl.cumsum(shared_B, 0) - shared_B, mask=there_B)
        before += tl.sum(pairs_B, 0)
        shared_before += tl.sum(shared_B, 0)
    tl.store(before_ptr + num_requests, before)


@triton.jit
def _lengths(BLOCK_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr):
    """Ascending; the last holds any context."""
    step_J = tl.arange(0, _LENGTHS)
    if SPLIT_KEYS > 0:
        length_J = tl.where(step_J == 0, SPLIT_KEYS, SPLIT_KEYS * RUN_SPLITS)
        length_J = tl.where(step_J > 1, _ALL_KEYS, length_J)
    else:  # 2, 3, 4, 6, 8, 12, .. tiles
        length_J = BLOCK_KEYS * (_MIN_TILES + (step_J % 2) * (_MIN_TILES // 2)) << (step_J // 2)
    return length_J


@triton.jit
def _requests(
    cu_rows_ptr,
    kv_lengths_ptr,
    request_B,
    num_requests,
    most_rows,
    TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Tiles of rows, none of a request of too many; the first and the last key that any row may see."""
    there_B = request_B < num_requests
    rows_B = tl.load(cu_rows_ptr + request_B + 1, mask=there_B, other=0)
    rows_B -= tl.load(cu_rows_ptr + request_B, mask=there_B, other=0)
    keys_B = tl.load(kv_lengths_ptr + request_B, mask=there_B, other=0)
    first_B = first_seen(keys_B - rows_B, WINDOW)
    tiles_B = tl.where(rows_B <= most_rows, tl.cdiv(rows_B, TILE_TOKENS), 0)
    return tiles_B, first_B, keys_B - 1


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first key that a row sees."""
    seen = position * 0
    if WINDOW > 0:
        seen = tl.maximum(position - WINDOW + 1, 0)
    return seen


@triton.jit
def count_pieces(first, last, length):
    """Pieces that keys first..last fall into."""
    return last // length - first // length + 1


@triton.jit
def _run_pieces(length, longest, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr):
    """How many pieces are added up before the sums are: as many as there are sums, so that both are few."""
    pieces = longest // length + 1
    run = 1
    if SPLIT_KEYS > 0:
        run = tl.where(length == SPLIT_KEYS, RUN_SPLITS, 1)
    else:
        while run * run < pieces:
            run *= 2
    return run


@triton.jit
def find_request(before_ptr, pair, num_requests):
    """Whose a pair is: as many requests as end before it."""
    request = 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        end_B = tl.load(before_ptr + 1 + request_B, mask=request_B < num_requests, other=2**31 - 1)
        request += tl.sum((end_B <= pair).to(tl.int32), 0)
    return request
