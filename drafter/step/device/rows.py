"""A step's bookkeeping on the GPU: which rows there are, where proposals go, what is accepted.

The rows of `drafter/step/states.py` and the verdict of `drafter/step/verification.py`, from request state
that lives on the device: the host reads nothing and grids follow from shapes, so all of it can be captured in
a CUDA graph. One launch each. Not the state's owner: tables are handed in.

Rows are ragged, request after request; rows behind the last request's are padding: they read nothing, and
their K and V go to the skip slot. Requests that are padding have no rows, and may have slot -1.

    slots_B      7    2    -1          cu_rows_B1   0    3    5    5        num_rows 8
    slots_N      7    7    7    2    2    -1    -1    -1
    positions_N  c7  c7+1 c7+2  c2  c2+1   0     0     0        (c: num_computed of the slot)

Legend: B requests of a step, N rows, X verdicts, W = 1 + most drafts, P pages of a request.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32  # rows, and requests, per program


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What is known of the running requests, one row per request slot, on the device.

    Attributes:
        token_ids: int64 [slots, longest sequence + 1].
        page_table: int32 [slots, P].
        num_computed: int32 [slots], tokens whose K/V exist: the next row's absolute position.
        page_size: rows of a page.
        skip_slot: the K/V slot that swallows what nobody may see.
    """

    token_ids: Tensor
    page_table: Tensor
    num_computed: Tensor
    page_size: int
    skip_slot: int


@dataclass(frozen=True, slots=True)
class RowIndices:
    """The rows of a step.

    Attributes:
        slots_N: int32, whose row it is; -1 is padding.
        positions_N: int64, absolute; 0 for padding.
        kv_slots_N: int64, where K and V go; the skip slot for padding.
        token_ids_N: int64, inputs; 0 for padding.
        kv_lengths_B: int32, tokens of a request up to its last row; 0 where it has no rows.
    """

    slots_N: Tensor
    positions_N: Tensor
    kv_slots_N: Tensor
    token_ids_N: Tensor
    kv_lengths_B: Tensor


def lay_out_rows(slots_B: Tensor, cu_rows_B1: Tensor, num_rows: int, tables: SlotTables) -> RowIndices:
    """The target's rows: known tokens and the drafts that `place_drafts` has put behind them.

    Args:
        slots_B: int32.
        cu_rows_B1: int32, the rows before each request; the last is the number of rows in use.
        num_rows: N, of the buffers.
    """
    return _lay_out(slots_B, cu_rows_B1, num_rows, tables, mask_id=None)


def block_inputs(
    slots_B: Tensor, cu_rows_B1: Tensor, num_rows: int, tables: SlotTables, *, mask_id: int
) -> RowIndices:
    """The drafter's rows: a request's first holds its anchor's token, the others `mask_id`."""
    return _lay_out(slots_B, cu_rows_B1, num_rows, tables, mask_id)


def _lay_out(
    slots_B: Tensor, cu_rows_B1: Tensor, num_rows: int, tables: SlotTables, mask_id: int | None
) -> RowIndices:
    num_requests = len(slots_B)
    assert len(cu_rows_B1) == num_requests + 1, "one more than requests"

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=slots_B.device)

    rows = RowIndices(
        slots_N=empty(num_rows, torch.int32),
        positions_N=empty(num_rows, torch.int64),
        kv_slots_N=empty(num_rows, torch.int64),
        token_ids_N=empty(num_rows, torch.int64),
        kv_lengths_B=empty(num_requests, torch.int32),
    )
    _lay_out_rows[triton.cdiv(max(num_rows, num_requests), _ROWS),](
        slots_B,
        cu_rows_B1,
        tables.token_ids,
        tables.page_table,
        tables.num_computed,
        rows.slots_N,
        rows.positions_N,
        rows.kv_slots_N,
        rows.token_ids_N,
        rows.kv_lengths_B,
        num_rows,
        num_requests,
        tables.token_ids.stride(0),
        tables.page_table.stride(0),
        tables.skip_slot,
        mask_id or 0,
        PAGE_SIZE=tables.page_size,
        IS_BLOCK=mask_id is not None,
        REQUESTS=triton.next_power_of_2(num_requests),
        ROWS=_ROWS,
    )
    return rows


def place_drafts(chosen_N: Tensor, rows: RowIndices, tables: SlotTables) -> None:
    """Write the proposals behind the known tokens, where `lay_out_rows` reads them.

    Args:
        chosen_N: a token id per row of a block, int64; that of an anchor's row, and of padding, is ignored.
        rows: of `block_inputs`.
    """
    num_rows = len(chosen_N)
    assert len(rows.slots_N) == num_rows, "a choice per row"
    _place_drafts[triton.cdiv(num_rows, _ROWS),](
        chosen_N,
        rows.slots_N,
        rows.positions_N,
        tables.num_computed,
        tables.token_ids,
        num_rows,
        tables.token_ids.stride(0),
        ROWS=_ROWS,
        num_warps=1,
    )


def accept_and_advance(
    chosen_X: Tensor,
    first_chosen_B: Tensor,
    slots_B: Tensor,
    cu_rows_B1: Tensor,
    num_drafts_B: Tensor,
    samples_B: Tensor,
    tables: SlotTables,
    max_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Judge the drafts, write the step's new tokens behind the known ones, and advance `num_computed`.

    A request's last rows are its drafts; the verdicts on them begin at its last known row, and the one after
    the last draft that stands is a token too. A request that does not sample only advances.

        row          known  known  draft1 draft2 draft3
        verdict                    X1     X2     X3     X4       X1 is chosen[first_chosen]
        draft1 = X1, draft2 != X2: out X1 X2, num_tokens 2, num_computed + 3

    Args:
        chosen_X: the target's choices, int64.
        first_chosen_B: where a request's 1 + num_drafts choices begin in it, int32; of samplers only.
        slots_B, cu_rows_B1: as in `lay_out_rows`.
        num_drafts_B: int32; 0 where nothing is sampled.
        samples_B: bool or int32, whether the last known token is among the rows.
        max_drafts: at least the largest number of drafts.

    Returns:
        token_ids [B, W] (int32), the new tokens of each request, then -1; and num_tokens [B] (int32).
    """
    num_requests = len(slots_B)
    token_ids_BW = torch.empty(num_requests, max_drafts + 1, dtype=torch.int32, device=slots_B.device)
    num_tokens_B = torch.empty(num_requests, dtype=torch.int32, device=slots_B.device)
    _accept_and_advance[num_requests,](
        chosen_X,
        first_chosen_B,
        slots_B,
        cu_rows_B1,
        num_drafts_B,
        samples_B,
        tables.token_ids,
        tables.num_computed,
        token_ids_BW,
        num_tokens_B,
        tables.token_ids.stride(0),
        WIDTH=max_drafts + 1,
        LANES=triton.next_power_of_2(max_drafts + 1),
        num_warps=1,  # a warp reads all drafts before it writes over them
    )
    return token_ids_BW, num_tokens_B


@triton.jit
def _lay_out_rows(
    slots,
    cu_rows,
    token_ids,
    page_table,
    num_computed,
    row_slots,
    row_positions,
    row_kv_slots,
    row_token_ids,
    kv_lengths,
    num_rows,
    num_requests,
    token_stride,
    page_stride,
    skip_slot,
    mask_id,
    PAGE_SIZE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`ROWS` rows, and the lengths of as many requests."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    requests = tl.arange(0, REQUESTS)
    ends = tl.load(cu_rows + 1 + requests, mask=requests < num_requests, other=2**31 - 1)
    owner = tl.sum(
        (ends[None, :] <= rows[:, None]).to(tl.int32), 1
    )  # requests that lie wholly before the row
    is_real = (rows < num_rows) & (owner < num_requests)
    slot = tl.load(slots + owner, mask=is_real, other=-1)
    first = tl.load(cu_rows + owner, mask=is_real, other=0)
    offset = tl.where(is_real, rows - first, 0)
    position = tl.load(num_computed + slot, mask=is_real, other=0) + offset
    page = tl.load(
        page_table + slot.to(tl.int64) * page_stride + position // PAGE_SIZE, mask=is_real, other=0
    )
    kv_slot = tl.where(is_real, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, skip_slot)
    is_known = is_real & (offset == 0) if IS_BLOCK else is_real
    token = tl.load(token_ids + slot.to(tl.int64) * token_stride + position, mask=is_known, other=0)
    if IS_BLOCK:
        token = tl.where(is_real & (offset > 0), mask_id, token)
    is_row = rows < num_rows
    tl.store(row_slots + rows, slot, mask=is_row)
    tl.store(row_positions + rows, position.to(tl.int64), mask=is_row)
    tl.store(row_kv_slots + rows, kv_slot, mask=is_row)
    tl.store(row_token_ids + rows, token, mask=is_row)

    is_request = rows < num_requests
    count = tl.load(cu_rows + 1 + rows, mask=is_request, other=0) - tl.load(
        cu_rows + rows, mask=is_request, other=0
    )
    their_slot = tl.load(slots + rows, mask=is_request, other=-1)
    computed = tl.load(num_computed + their_slot, mask=is_request & (count > 0), other=0)
    tl.store(kv_lengths + rows, computed + count, mask=is_request)


@triton.jit
def _place_drafts(
    chosen, slots, positions, num_computed, token_ids, num_rows, token_stride, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    position = tl.load(positions + rows, mask=slot >= 0, other=0)
    is_draft = (slot >= 0) & (position > tl.load(num_computed + slot, mask=slot >= 0, other=0))
    token = tl.load(chosen + rows, mask=is_draft, other=0)
    tl.store(token_ids + slot.to(tl.int64) * token_stride + position, token, mask=is_draft)


@triton.jit
def _accept_and_advance(
    chosen,
    first_chosen,
    slots,
    cu_rows,
    num_drafts,
    samples,
    token_ids,
    num_computed,
    out_token_ids,
    out_num_tokens,
    token_stride,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    count = tl.load(cu_rows + request + 1) - tl.load(cu_rows + request)
    if count == 0:
        tl.store(out_token_ids + request * WIDTH + lanes, -1, mask=lanes < WIDTH)
        tl.store(out_num_tokens + request, 0)
        return
    slot = tl.load(slots + request)
    drafts = tl.load(num_drafts + request)
    is_sampled = tl.load(samples + request) != 0
    num_known = tl.load(num_computed + slot) + count - drafts
    behind = token_ids + slot.to(tl.int64) * token_stride + num_known
    is_judged = is_sampled & (lanes <= drafts)
    verdict = tl.load(
        chosen + tl.load(first_chosen + request, mask=is_sampled, other=0) + lanes, mask=is_judged, other=-1
    )
    draft = tl.load(behind + lanes, mask=lanes < drafts, other=-1)
    stands = (lanes < drafts) & (draft == verdict)
    num_accepted = tl.min(
        tl.where(stands, LANES, lanes), 0
    )  # the first that does not; lane `drafts` never does
    is_new = is_judged & (lanes <= num_accepted)
    tl.store(behind + lanes, verdict, mask=is_new)
    tl.store(num_computed + slot, num_known + tl.where(is_sampled, num_accepted, 0))
    tl.store(
        out_token_ids + request * WIDTH + lanes,
        tl.where(is_new, verdict, -1).to(tl.int32),
        mask=lanes < WIDTH,
    )
    tl.store(out_num_tokens + request, tl.where(is_sampled, num_accepted + 1, 0))
