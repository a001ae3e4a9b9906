"""Lays out a step's rows on the GPU: slots, positions, tokens, K/V slots, and places of drafts.

Does what `drafter/step/inputs/row_layout.py` does on the host, from request state on the device: the host
reads nothing and grids follow from shapes, so it can be captured in a CUDA graph. One launch each. Tables are
passed in; `drafter/step/gpu_triton/request_states.py` owns them.

Rows are ragged, request after request. Rows past the last request's are padding: they read nothing, and their
K and V go to the skip slot. Padding requests have no rows, and may have slot -1.

    slots_R      7    2    -1          cu_rows_R1   0    3    5    5        num_rows 8
    slots_N      7    7    7    2    2    -1    -1    -1
    positions_N  c7  c7+1 c7+2  c2  c2+1   0     0     0        (c: num_computed of the slot)

Legend: R requests of a step, N rows, P pages of a request, G page groups.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ....compute.backend import PlacedRows
from ....compute.gpu_triton.attention.attention_tiles import PagedRows

Ints = NDArray[np.int32]
_ROWS = 32  # rows, and requests, per program
_REQUESTS = 64  # scanned per iteration


@dataclass(frozen=True, slots=True)
class SlotTables:
    """State of the running requests on the device, one row per request slot.

    Attributes:
        token_ids: int32 [slots, longest sequence + 1].
        page_tables: int32 [G, slots, P].
        num_computed: int32 [slots], tokens with existing K/V: the next row's absolute position.
        page_size: rows of a page.
        skip_slots: int64 [G], the K/V slot to which discarded rows are written.
    """

    token_ids: Tensor
    page_tables: Tensor
    num_computed: Tensor
    page_size: int
    skip_slots: Tensor


@dataclass(frozen=True, slots=True)
class DeviceStepRequests:
    """The requests of a pass: int32 tensors on the device, and what the host knows of them.

    Attributes:
        slots_R, cu_rows_R1, num_drafts_R: slots, rows before each, drafts among their last rows.
        samples_R: 1 if the request samples tokens.
        first_chosen_R: index of each request's first sampled row among all sampled rows.
        num_rows: N, padding included; without padding if `host_spans_R2` is given.
        max_rows, max_drafts: upper bounds over requests.
        sampled_X: rows for which a token is sampled; None if all are.
        host_spans_R2: first position and rows of each, on the host; None if only the device knows them.
    """

    slots_R: Tensor
    cu_rows_R1: Tensor
    num_drafts_R: Tensor
    samples_R: Tensor
    first_chosen_R: Tensor
    num_rows: int
    max_rows: int
    max_drafts: int
    sampled_X: Tensor | None = None
    host_spans_R2: Ints | None = None

    @staticmethod
    def list_length(max_requests: int) -> int:
        """Return the length of each list of `pack` for this many requests, a multiple of 16 bytes."""
        return (max_requests // 4 + 1) * 4

    @classmethod
    def decoding(cls, lists_LW: Tensor, num_requests: int, width: int, num_rows: int) -> DeviceStepRequests:
        """Return views of `pack`'s lists for decoding requests of at most `width` rows each."""
        return cls(*_views(lists_LW, num_requests), num_rows=num_rows, max_rows=width, max_drafts=width - 1)

    @classmethod
    def prompts(
        cls, lists_LW: Tensor, first_R: Ints, num_rows_R: Ints, num_sampled: int
    ) -> DeviceStepRequests:
        """Return views of `pack`'s lists for prompt chunks without drafts; some sample in their last row.

        Positions are known to the host.
        """
        return cls(
            *_views(lists_LW, len(num_rows_R)),
            num_rows=int(num_rows_R.sum()),
            max_rows=int(num_rows_R.max()),
            max_drafts=0,
            sampled_X=lists_LW[-1, :num_sampled],
            host_spans_R2=np.stack((first_R, num_rows_R), axis=1),
        )

    def sampling_anchors(self) -> DeviceStepRequests:
        """Return the requests with a row less each: in their blocks the anchors sample, too (`StepRows`)."""
        before_R1 = _requests_before(self.cu_rows_R1)
        return replace(self, cu_rows_R1=self.cu_rows_R1 - before_R1.to(self.cu_rows_R1.dtype))

    def at_masks(self, values_N: Tensor) -> Tensor:
        """Return values [N] of `sampling_anchors`' rows where this layout has the masks; the rest is
        arbitrary.
        """
        rows_N = torch.arange(len(values_N), device=values_N.device)
        requests_N = torch.searchsorted(self.cu_rows_R1[1:].contiguous(), rows_N, right=True)
        before_N = _requests_before(self.cu_rows_R1)[requests_N]
        return values_N[(rows_N - before_N - 1).clamp(min=0)]


def _requests_before(cu_rows_R1: Tensor) -> Tensor:
    """Return the number of requests with rows before each, and of all [R + 1], int64."""
    return torch.nn.functional.pad((cu_rows_R1.diff() > 0).cumsum(0), (1, 0))


NUM_LISTS = 6


def _views(lists_LW: Tensor, num_requests: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots, cu_rows, drafts, samples, first, _ = lists_LW.unbind(0)
    r = num_requests
    return slots[:r], cu_rows[: r + 1], drafts[:r], samples[:r], first[:r]


def pack(
    slots_R: Ints, num_rows_R: Ints, num_drafts_R: Ints, samples_R: NDArray[np.bool_], room: int
) -> Ints:
    """Pack requests as lists [L, W] of `list_length` integers each; entries past the given requests have no
    rows.

    Order: slots, rows before each, drafts, whether they sample, index of the first sampled row; and the last
    rows of those that sample, used if no request drafts.
    """
    num_requests, ends_R = len(slots_R), np.cumsum(num_rows_R)
    counts_R, lasts_X = np.where(samples_R, 1 + num_drafts_R, 0), ends_R[samples_R] - 1
    lists_LW = np.zeros((NUM_LISTS, room), dtype=np.int32)
    slots, cu_rows, drafts, samples, first, sampled = lists_LW
    slots[:num_requests] = slots_R
    cu_rows[1 : num_requests + 1] = ends_R
    cu_rows[num_requests + 1 :] = num_rows_R.sum()
    drafts[:num_requests] = num_drafts_R
    samples[:num_requests] = samples_R
    first[:num_requests] = np.cumsum(counts_R) - counts_R
    sampled[: len(lasts_X)] = lasts_X
    return lists_LW


@dataclass(frozen=True, slots=True)
class DeviceStepRows(PlacedRows):
    """A model's rows in a step; each batch is a `PagedRows`. K and V of padding go to the skip slot.

    Attributes:
        token_ids_N: int64, inputs; 0 for padding.
        slots_N: int32, slot of each row's request; -1 is padding.
    """

    token_ids_N: Tensor
    slots_N: Tensor

    @property
    def tree_paths(self) -> Tensor | None:
        """Paths [N, D] of the rows of draft trees (`TreeRows`)."""
        batch: PagedRows = self.batches[0]
        return None if batch.tree is None else batch.tree.paths_ND

    def at_next_positions(self) -> DeviceStepRows:
        """Return the rows with the positions of the tokens that they sample, if their anchors sample, too."""
        return replace(self, positions_N=self.positions_N + 1)

    def tokens_before(self, chosen_N: Tensor, anchor_distance: int) -> Tensor:
        """Return the token before each draft [N]: the previous row's choice, or the anchor; arbitrary for
        anchors that do not sample, and padding.
        """
        is_first_N = torch.ones_like(self.slots_N, dtype=torch.bool)
        is_first_N[1:] = self.slots_N[1:] != self.slots_N[:-1]
        after_anchor_N, anchors_N = (x.roll(anchor_distance) for x in (is_first_N, self.token_ids_N))
        return torch.where(after_anchor_N, anchors_N, chosen_N.roll(1))

    def owners(self) -> Tensor:
        return self.slots_N

    def padding_owners(self) -> Tensor:
        return self.slots_N


def lay_out_rows(requests: DeviceStepRequests, tables: SlotTables) -> DeviceStepRows:
    """Return the target's rows: known tokens and the drafts that `write_drafts` wrote after them."""
    return _lay_out(requests, tables, mask_id=None)


def lay_out_block(requests: DeviceStepRequests, tables: SlotTables, mask_id: int) -> DeviceStepRows:
    """Return the drafter's rows: the anchor's token in a request's first row, `mask_id` in the others."""
    return _lay_out(requests, tables, mask_id)


def _lay_out(requests: DeviceStepRequests, tables: SlotTables, mask_id: int | None) -> DeviceStepRows:
    slots_R, cu_rows_R1, num_rows = requests.slots_R, requests.cu_rows_R1, requests.num_rows
    num_requests = len(slots_R)
    assert len(cu_rows_R1) == num_requests + 1, "one more than requests"

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=slots_R.device)

    num_groups = len(tables.page_tables)
    kv_stride = (num_rows + 1) // 2 * 2  # every group begins at a multiple of 16 bytes
    kv_slots_GN = empty(num_groups * kv_stride, torch.int64).view(num_groups, kv_stride)[:, :num_rows]
    kv_lengths_R = empty(num_requests, torch.int32)
    shared = slots_R, cu_rows_R1, kv_lengths_R
    rows = DeviceStepRows(
        positions_N=empty(num_rows, torch.int64),
        kv_slots=kv_slots_GN.unbind(0),
        batches=tuple(
            PagedRows(*shared, page_table, requests.max_rows, requests.host_spans_R2)
            for page_table in tables.page_tables.unbind(0)
        ),
        token_ids_N=empty(num_rows, torch.int64),
        slots_N=empty(num_rows, torch.int32),
    )
    _lay_out_rows[triton.cdiv(max(num_rows, num_requests), _ROWS),](
        slots_R, cu_rows_R1, tables.token_ids, tables.page_tables, tables.num_computed, rows.slots_N,
        rows.positions_N, kv_slots_GN, rows.token_ids_N, kv_lengths_R, kv_stride, num_rows, num_requests,
        tables.token_ids.stride(0), tables.page_tables.stride(0), tables.page_tables.stride(1),
        tables.skip_slots, mask_id or 0,
        NUM_GROUPS=num_groups, PAGE_SIZE=tables.page_size, IS_BLOCK=mask_id is not None, REQUESTS=_REQUESTS,
        ROWS=_ROWS,
    )  # fmt: skip
    return rows


def write_drafts(chosen_N: Tensor, rows: DeviceStepRows, tables: SlotTables) -> None:
    """Write drafts after the known tokens, where `lay_out_rows` reads them.

    Args:
        chosen_N: a token id per row of a block, int64; those of anchors and of padding are ignored.
        rows: the rows from `lay_out_block`.
    """
    num_rows = len(chosen_N)
    assert len(rows.slots_N) == num_rows, "a choice per row"
    _write_drafts[triton.cdiv(num_rows, _ROWS),](
        chosen_N, rows.slots_N, rows.positions_N, tables.num_computed, tables.token_ids, num_rows,
        tables.token_ids.stride(0),
        ROWS=_ROWS, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["kv_stride", "num_rows", "num_requests"])
def _lay_out_rows(
    slots, cu_rows, token_ids, page_tables, num_computed, row_slots, row_positions, row_kv_slots,
    row_token_ids, kv_lengths, kv_stride, num_rows, num_requests, token_stride, group_stride, table_stride,
    skip_slots, mask_id,
    NUM_GROUPS: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Lay out `ROWS` rows, and compute the K/V lengths of as many requests."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = tl.zeros([ROWS], tl.int32)  # number of requests that end before the row
    for begin in range(0, num_requests, REQUESTS):
        requests = begin + tl.arange(0, REQUESTS)
        ends = tl.load(cu_rows + 1 + requests, mask=requests < num_requests, other=2**31 - 1)
        owner += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    is_real = (rows < num_rows) & (owner < num_requests)
    slot = tl.load(slots + owner, mask=is_real, other=-1)
    first = tl.load(cu_rows + owner, mask=is_real, other=0)
    offset = tl.where(is_real, rows - first, 0)
    position = tl.load(num_computed + slot, mask=is_real, other=0) + offset
    is_known = is_real & (offset == 0) if IS_BLOCK else is_real
    token = tl.load(token_ids + slot.to(tl.int64) * token_stride + position, mask=is_known, other=0)
    if IS_BLOCK:
        token = tl.where(is_real & (offset > 0), mask_id, token)
    is_row = rows < num_rows
    tl.store(row_slots + rows, slot, mask=is_row)
    tl.store(row_positions + rows, position.to(tl.int64), mask=is_row)
    entry = slot.to(tl.int64) * table_stride + position // PAGE_SIZE
    for group in tl.static_range(NUM_GROUPS):
        page = tl.load(page_tables + group * group_stride + entry, mask=is_real, other=0)
        kv_slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        kv_slot = tl.where(is_real, kv_slot, tl.load(skip_slots + group))
        tl.store(row_kv_slots + group * kv_stride + rows, kv_slot, mask=is_row)
    tl.store(row_token_ids + rows, token, mask=is_row)

    is_request = rows < num_requests
    count = tl.load(cu_rows + 1 + rows, mask=is_request, other=0) - tl.load(
        cu_rows + rows, mask=is_request, other=0
    )
    their_slot = tl.load(slots + rows, mask=is_request, other=-1)
    computed = tl.load(num_computed + their_slot, mask=is_request & (count > 0), other=0)
    tl.store(kv_lengths + rows, computed + count, mask=is_request)


@triton.jit(do_not_specialize=["num_rows"])
def _write_drafts(
    chosen, slots, positions, num_computed, token_ids, num_rows, token_stride, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    position = tl.load(positions + rows, mask=slot >= 0, other=0)
    is_draft = (slot >= 0) & (position > tl.load(num_computed + slot, mask=slot >= 0, other=0))
    token = tl.load(chosen + rows, mask=is_draft, other=0)
    tl.store(token_ids + slot.to(tl.int64) * token_stride + position, token, mask=is_draft)
