"""Builds an attention call's work list on the device: how contexts are split among programs.

A *pair* is a tile of a request's rows and a piece of its keys; pairs times kv heads are the items that
`paged_attention.py`'s programs share. Pieces have one length per call and begin at multiples of it, so that a
context of 32k among 31 short ones becomes many items of similar size. The length is chosen here from the
step's lengths, to minimize the estimated time, in units of keys that a program reads:

    rounds of all programs * (keys of an item + its fixed cost + write and read of its partial result)

Unsplit contexts win if requests fill the device, pieces of 128 keys for a single request with a thousand
keys. Batch-invariant mode has three lengths: a split, a run of splits, everything; sums always consist of
splits and runs (`key_tiles.py`), so bits do not depend on the choice.

One program, launched once per pass for all layers of a kind; the host reads nothing back.

    work    piece length | pieces of a run | pairs before each request, and all | shared pairs before each

Legend: B requests (of one iteration), J candidate lengths.
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
_REQUESTS = tl.constexpr(64)  # per iteration
_LENGTHS = tl.constexpr(32)
_ITEM_KEYS = tl.constexpr(64)  # an item's cost besides its keys: its rows, the first memory latency
_ALL_KEYS = tl.constexpr(2**30)
_MIN_TILES = tl.constexpr(MIN_PIECE_TILES)


@dataclass(frozen=True, slots=True)
class WorkList:
    """A pass's work for layers of one kind: int32 `values` on the device, as above; programs to launch."""

    kind: AttentionKind
    plan: TilePlan
    workspace: AttentionWorkspace
    values: Tensor
    num_programs: int


def list_work(kind: AttentionKind, rows: PagedRows, workspace: AttentionWorkspace) -> WorkList:
    """Build the work list in one launch; the host need not know the contents of `rows`."""
    num_requests = len(rows.slots_B)
    max_rows = min(rows.max_rows, kind.most_rows)
    plan = plan_tiles(kind, max_rows, batch_invariant=workspace.batch_invariant)
    max_keys = rows.page_table.shape[1] * kind.page_size
    maximum = plan.num_programs(num_requests, max_rows, kind.num_kv_heads, max_keys)
    values = torch.empty(HEADER.value + 2 * num_requests + 1, dtype=torch.int32, device=rows.cu_rows.device)
    _list_work[(1,)](
        rows.cu_rows, rows.kv_lengths_B, values, num_requests, workspace.num_programs,
        workspace.num_slots(plan.block_rows), kind.most_rows,
        KV_HEADS=kind.num_kv_heads, BLOCK_ROWS=plan.block_rows, BLOCK_KEYS=plan.block_keys,
        TILE_TOKENS=plan.tile_tokens, WINDOW=kind.window or 0, SPLIT_KEYS=plan.split_keys,
        RUN_SPLITS=plan.run_splits, **dependent_launch(values.device),
    )  # fmt: skip
    return WorkList(kind, plan, workspace, values, min(maximum, workspace.num_programs))


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
    cu_rows_ptr, kv_lengths_ptr, work_ptr, num_requests, num_programs, num_slots, most_rows,
    KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    partial_J = tl.where(shared_J > 0, 2 * BLOCK_ROWS, 0)  # fp32 partials versus K and V in half precision
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
    """Return the candidate lengths, ascending; the last holds any context."""
    step_J = tl.arange(0, _LENGTHS)
    if SPLIT_KEYS > 0:
        length_J = tl.where(step_J == 0, SPLIT_KEYS, SPLIT_KEYS * RUN_SPLITS)
        length_J = tl.where(step_J > 1, _ALL_KEYS, length_J)
    else:  # 2, 3, 4, 6, 8, 12, .. tiles
        length_J = BLOCK_KEYS * (_MIN_TILES + (step_J % 2) * (_MIN_TILES // 2)) << (step_J // 2)
    return length_J


@triton.jit
def _requests(
    cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows,
    TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return tiles of rows (0 for requests with too many), and the first and last visible key."""
    there_B = request_B < num_requests
    rows_B = tl.load(cu_rows_ptr + request_B + 1, mask=there_B, other=0)
    rows_B -= tl.load(cu_rows_ptr + request_B, mask=there_B, other=0)
    keys_B = tl.load(kv_lengths_ptr + request_B, mask=there_B, other=0)
    first_B = first_seen(keys_B - rows_B, WINDOW)
    tiles_B = tl.where(rows_B <= most_rows, tl.cdiv(rows_B, TILE_TOKENS), 0)
    return tiles_B, first_B, keys_B - 1


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    seen = position * 0
    if WINDOW > 0:
        seen = tl.maximum(position - WINDOW + 1, 0)
    return seen


@triton.jit
def count_pieces(first, last, length):
    """Return the number of pieces that contain keys first..last."""
    return last // length - first // length + 1


@triton.jit
def _run_pieces(length, longest, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr):
    """Return the pieces per run: about the square root of all, so that runs are as many as pieces in each."""
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
    """Return a pair's request: the number of requests that end before it."""
    request = 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        end_B = tl.load(before_ptr + 1 + request_B, mask=request_B < num_requests, other=2**31 - 1)
        request += tl.sum((end_B <= pair).to(tl.int32), 0)
    return request
