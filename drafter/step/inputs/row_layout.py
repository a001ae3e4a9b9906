"""Lays out a step's rows on the host: slots, positions, tokens and K/V slots.

The definition, in NumPy and PyTorch; `step/cpu_numba/row_layout.py` implements it in compiled loops, and
`step/gpu_triton/inputs/row_layout.py` for device-resident state. The host knows pages, and tokens are where
the step computes, so indices are made here and copied there once. Tables are passed in;
`drafter/step/request_states.py` owns them.

Legend: N rows of a step, X sampled rows, R requests of a step, W values of a request, S slots, P pages of a
request, T tokens, G page groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ...compute.backend import PlacedRows
from .sampling_metadata import SamplingMetadata

Ints = NDArray[np.int64]
Layout = tuple[Tensor, Ints, Ints, Ints, Ints]


class RequestRows(NamedTuple):
    """Rows to lay out, request after request, int64 [R].

    Attributes:
        first_R: absolute position of each request's first row.
        counts_R: number of its last rows for which a token is sampled.
    """

    slots_R: Ints
    first_R: Ints
    num_rows_R: Ints
    counts_R: Ints


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of a step: a plan's numbers as int64.

    Attributes:
        slots_R, num_rows_R, num_drafts_R: slots, rows of each, drafts among their last rows.
        first_R: absolute position of each request's first row.
        begin_R: position after its known tokens.
        counts_R: number of its last rows for which a token is sampled.
    """

    plan: SchedulerOutput
    slots_R: Ints
    num_rows_R: Ints
    num_drafts_R: Ints
    first_R: Ints
    begin_R: Ints
    counts_R: Ints


@dataclass(frozen=True, slots=True)
class StepRows(PlacedRows):
    """A model's rows in a step, request after request.

    The target's: known tokens, then drafts. The drafter's: [anchor, MASK x k] of every request that drafts,
    with slots in look-ahead pages; [anchor, MASK x (k - 1)] if the anchor's row samples, too (DSpark).

    Attributes:
        token_ids_N: inputs.
        sampled_X: rows for which a token is sampled: the target's last rows, all masks of the drafter, and
            its anchors if `anchor_distance` is 0.
        counts_R: sampled rows of each request of the plan, int64.
        max_count: maximum of `counts_R`.
        sampling: sampling parameters of each sampled row; a draft is sampled as the target will sample it.
        num_rows_R: rows of each request that has any, int64, on the host.
        anchor_distance: rows from a request's anchor to its first sampled row. 0: all rows of a block predict
            the next position's token, the anchor's too. 1: a mask predicts the token at its own position.
    """

    token_ids_N: Tensor
    sampled_X: Tensor
    counts_R: Tensor
    max_count: int
    sampling: SamplingMetadata
    num_rows_R: Ints
    anchor_distance: int = 1

    def owners(self) -> Tensor:
        owners_N = np.repeat(np.arange(len(self.num_rows_R)), self.num_rows_R)
        return torch.from_numpy(owners_N).to(self.token_ids_N.device)

    def previous(self, values_XP: Tensor) -> Tensor:
        """Return each sampled row's values [X, P] of the row before, or its anchor's token in a request's
        first row.
        """
        starts_R = (self.counts_R.cumsum(0) - self.counts_R)[self.counts_R > 0]
        is_first_X1 = torch.zeros(len(values_XP), 1, dtype=torch.bool, device=values_XP.device)
        is_first_X1[starts_R] = True
        anchors_X1 = self.token_ids_N[self.sampled_X - self.anchor_distance].unsqueeze(1)
        return torch.where(is_first_X1, anchors_X1, values_XP.roll(1, dims=0))


def lay_out_rows(tokens_ST: Tensor, rows_R: RequestRows, page_tables_GSP: Ints, page_size: int) -> Layout:
    """Lay out rows; `tokens_ST` are on the device of the step.

    Returns:
        token_ids_N, on the device of `tokens`; positions_N, kv_slots_GN; sampled_X (rows), slots_X (of
        their requests). int64.
    """
    slots_R, first_R, num_rows_R, counts_R = rows_R
    ends_R = np.cumsum(num_rows_R)
    rows_N, slots_N = np.arange(num_rows_R.sum()), np.repeat(slots_R, num_rows_R)
    positions_N = rows_N + np.repeat(first_R - ends_R + num_rows_R, num_rows_R)
    pages_GN = page_tables_GSP[:, slots_N, positions_N // page_size]
    # Advanced indexing leaves a group's slots strided; readers want them contiguous.
    kv_slots_GN = np.ascontiguousarray(pages_GN * page_size + positions_N % page_size)
    sampled_X = np.flatnonzero(rows_N >= np.repeat(ends_R - counts_R, num_rows_R))
    token_ids_N = tokens_ST[_to_device(tokens_ST, slots_N), _to_device(tokens_ST, positions_N)]
    return token_ids_N, positions_N, kv_slots_GN, sampled_X, slots_N[sampled_X]


def write_tokens(tokens_ST: Tensor, slots_R: Ints, begin_R: Ints, counts_R: Ints, values_RW: Tensor) -> None:
    """Write each request's first `counts` values, except negative ones, from position `begin` on.

    The last column of `tokens` is scratch: discarded values are written there.
    """
    columns_W = torch.arange(values_RW.shape[1], device=values_RW.device)
    wanted_RW = (columns_W < _to_device(tokens_ST, counts_R).unsqueeze(1)) & (values_RW >= 0)
    columns_RW = _to_device(tokens_ST, begin_R).unsqueeze(1) + columns_W
    columns_RW = torch.where(wanted_RW, columns_RW, tokens_ST.shape[1] - 1)
    tokens_ST[_to_device(tokens_ST, slots_R).unsqueeze(1), columns_RW] = values_RW


def by_request(values_X: Tensor, counts_R: Tensor, width: int) -> Tensor:
    """Scatter concatenated values [X] to requests [R, W]; past each one's `counts` -1 or nan."""
    columns_W = torch.arange(width, device=counts_R.device)
    nothing = torch.nan if values_X.is_floating_point() else -1
    if values_X.numel() == 0:
        return values_X.new_full((len(counts_R), width), nothing)
    starts_R = counts_R.cumsum(0) - counts_R
    places_RW = (starts_R.unsqueeze(1) + columns_W).clamp_(max=values_X.numel() - 1)
    return torch.where(columns_W < counts_R.unsqueeze(1), values_X[places_RW], nothing)


def _to_device(tokens: Tensor, values: Ints) -> Tensor:
    return torch.from_numpy(values).to(tokens.device)
