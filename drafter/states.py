"""What a worker knows of the running requests, by slot: tokens, pages, sampling; and the rows of a step.

A mirror, not an authority: it changes only as plans and results say. Token ids live on the device, where
new ones are made; pages and sampling come from the host and stay there, so a step's indices are made with
NumPy and put on the device once. Used by target ranks and by a split drafter alike.

Order within a step: `apply(plan)`, drafter's `block_rows(plan)`, `place_drafts(plan, drafts)`, `rows(plan)`,
`append(plan, token_ids, num_tokens)`.

Legend: N rows of a step, X sampled rows, R requests of a step, B requests that draft, K most drafts,
W = K + 1, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cluster.plan import AdmittedRequest, SchedulerOutput
from .attention import AttentionBatch
from .backend import PlacedRows
from .cpu import rows
from .kv_cache import skip_slot
from .sampling import SamplingBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows(PlacedRows):
    """The target's rows of a step, request after request.

    Attributes:
        token_ids_N: inputs, drafts included.
        sampled_X: rows whose logits are needed.
        counts_R: how many of them each request has.
        sampling: how a token is chosen in each sampled row.
    """

    token_ids_N: Tensor
    sampled_X: Tensor
    counts_R: Tensor
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class BlockRows(PlacedRows):
    """The drafter's rows of a step: [anchor, MASK x k] of every request that drafts; slots lie in look-ahead
    pages.

    Attributes:
        anchors_B: the anchors' token ids.
        anchor_rows_B, mask_rows_X: which rows are which.
        sampling: how a proposal is chosen in each mask row: as the target will choose there.
        num_requests: R of the plan.
        places_X: place of each proposal in the flattened [R, K].
        max_drafts: K.
    """

    anchors_B: Tensor
    anchor_rows_B: Tensor
    mask_rows_X: Tensor
    sampling: SamplingBatch
    num_requests: int
    places_X: Tensor
    max_drafts: int


class RequestStates:
    """Slots of running requests; see the module's text.

    Args:
        attention_batch: makes what the models' backend wants to know of a step; see `AttentionBatch.build`.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        attention_batch: Callable[..., Any] = AttentionBatch.build,
    ) -> None:
        self.device = torch.device(device)
        self._attention_batch = attention_batch
        self.page_size = page_size
        self.skip_slot = skip_slot(num_pages, page_size)
        self._max_len = max_model_len
        # One column more than the longest sequence: what must not be kept is written there.
        self.token_ids = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int64, device=self.device)
        self._host_tokens = self.token_ids.numpy() if self.device.type == "cpu" else None
        self.page_table = np.zeros((num_slots, -(-max_model_len // page_size)), dtype=np.int64)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        self._stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self._num_computed = np.zeros(num_slots, dtype=np.int64)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in admissions and new pages; comes first in a step."""
        for request in plan.admitted:
            self._admit(request)
        if len(plan.page_slots):
            self.page_table[plan.page_slots, plan.page_indices] = plan.page_ids

    def _admit(self, request: AdmittedRequest) -> None:
        slot, sampling = request.slot, request.sampling
        tokens = torch.from_numpy(np.array(request.token_ids, dtype=np.int64))
        self.token_ids[slot, : len(tokens)] = tokens.to(self.device)
        # A sequence may end when its next step is planned already: rows beyond its pages go nowhere.
        self.page_table[slot] = self.skip_slot // self.page_size
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._min_length[slot] = sampling.min_length
        self._stop_ids[slot] = sampling.stop_token_ids

    def rows(self, plan: SchedulerOutput) -> StepRows:
        """The target's rows; drafts must have been placed."""
        slots_R, rows_R = _as_int64(plan.slots, plan.num_rows)
        first_R = self._first(plan)
        counts_R = np.where(plan.samples, 1 + plan.num_drafts.astype(np.int64), 0)
        positions_N, kv_slots_N, sampled_X, slots_X = rows.target_rows(
            slots_R, first_R, rows_R, counts_R, self.page_table, self.page_size
        )
        return StepRows(
            token_ids_N=self._read(slots_R, first_R, rows_R),
            positions_N=self._put(positions_N),
            kv_slots_N=self._put(kv_slots_N),
            batch=self._attention(slots_R, first_R, rows_R),
            sampled_X=self._put(sampled_X),
            counts_R=self._put(counts_R),
            sampling=self._sampling(slots_X, positions_N[sampled_X] + 1),
        )

    def block_rows(self, plan: SchedulerOutput) -> BlockRows | None:
        """The drafter's rows, or None if nobody drafts."""
        max_drafts = int(plan.num_drafts.max(initial=0))
        if max_drafts == 0:
            return None
        who_B = np.flatnonzero(plan.num_drafts)
        slots_B, drafts_B = _as_int64(plan.slots[who_B], plan.num_drafts[who_B])
        anchor_B = self._first(plan)[who_B]
        positions_N, kv_slots_N, mask_rows_X, slots_X, places_X = rows.block_rows(
            who_B, slots_B, anchor_B, drafts_B, max_drafts, self.page_table, self.page_size
        )
        return BlockRows(
            anchors_B=self._read(slots_B, anchor_B, np.ones_like(slots_B)),
            anchor_rows_B=self._put(np.cumsum(drafts_B + 1) - drafts_B - 1),
            mask_rows_X=self._put(mask_rows_X),
            positions_N=self._put(positions_N),
            kv_slots_N=self._put(kv_slots_N),
            batch=self._attention(slots_B, anchor_B, drafts_B + 1),
            sampling=self._sampling(slots_X, positions_N[mask_rows_X]),
            num_requests=plan.num_requests,
            places_X=self._put(places_X),
            max_drafts=max_drafts,
        )

    def place_drafts(self, plan: SchedulerOutput, drafts_RK: Tensor) -> None:
        """Write proposals behind the known tokens, where `rows` reads them; -1 marks what is none."""
        if drafts_RK.shape[1]:
            self._write(plan, drafts_RK, plan.num_drafts.astype(np.int64))

    def append(self, plan: SchedulerOutput, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Write the tokens that came out of the step over the drafts, and step on."""
        counts_R = num_tokens_R.cpu().numpy()
        self._write(plan, token_ids_RW, counts_R)
        accepted_R = np.maximum(counts_R - 1, 0)
        self._num_computed[plan.slots] = self._first(plan) + plan.num_rows - plan.num_drafts + accepted_R

    def _first(self, plan: SchedulerOutput) -> Ints:
        """Absolute position of each request's first row; before `append`."""
        return np.where(plan.num_computed < 0, self._num_computed[plan.slots], plan.num_computed)

    def _write(self, plan: SchedulerOutput, values_RW: Tensor, counts_R: Ints) -> None:
        """Write each request's first `counts` values behind its known tokens, but for negative ones."""
        slots_R, rows_R, drafts_R = _as_int64(plan.slots, plan.num_rows, plan.num_drafts)
        begin_R = self._first(plan) + rows_R - drafts_R
        if self._host_tokens is not None:
            rows.write_tokens(self._host_tokens, slots_R, begin_R, counts_R, values_RW.numpy())
            return
        columns_W = torch.arange(values_RW.shape[1], device=self.device)
        columns_RW = self._put(begin_R).unsqueeze(1) + columns_W
        wanted_RW = (columns_W < self._put(counts_R).unsqueeze(1)) & (values_RW >= 0)
        columns_RW = torch.where(wanted_RW, columns_RW, self._max_len)
        self.token_ids[self._put(slots_R).unsqueeze(1), columns_RW] = values_RW

    def _read(self, slots_R: Ints, first_R: Ints, rows_R: Ints) -> Tensor:
        """Tokens [N] of so many positions of each request."""
        if self._host_tokens is not None:
            return self._put(rows.read_tokens(self._host_tokens, slots_R, first_R, rows_R, rows_R.sum()))
        owner_N = np.repeat(np.arange(len(rows_R)), rows_R)
        begin_R = np.cumsum(rows_R) - rows_R
        positions_N = np.arange(len(owner_N)) - begin_R[owner_N] + first_R[owner_N]
        return self.token_ids[self._put(slots_R[owner_N]), self._put(positions_N)]

    def _attention(self, slots_R: Ints, first_R: Ints, rows_R: Ints) -> Any:
        longest = int((first_R + rows_R).max())
        pages_RP = self.page_table[slots_R, : -(-longest // self.page_size)]
        return self._attention_batch(first_R, rows_R, pages_RP, self.page_size, self.device)

    def _sampling(self, slots_X: Ints, positions_X: Ints) -> SamplingBatch:
        temperature_X = self._temperature[slots_X]
        forbidden = self._forbidden(slots_X, positions_X)
        if not temperature_X.any():
            return SamplingBatch.greedy(len(slots_X), forbidden, self.device)
        return SamplingBatch.build(
            temperature=temperature_X,
            top_k=self._top_k[slots_X],
            top_p=self._top_p[slots_X],
            min_p=self._min_p[slots_X],
            seed=self._seed[slots_X],
            position=positions_X,
            forbidden=forbidden,
            device=self.device,
        )

    def _forbidden(self, slots_X: Ints, positions_X: Ints) -> Ints | None:
        """Stop tokens of the rows whose sequence is still shorter than its minimum."""
        early = np.flatnonzero(positions_X < self._min_length[slots_X])
        pairs = [(row, token) for row in early.tolist() for token in self._stop_ids[slots_X[row]]]
        return np.array(pairs, dtype=np.int64).T if pairs else None

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _as_int64(*arrays: NDArray[np.integer]) -> tuple[Ints, ...]:
    return tuple(array.astype(np.int64) for array in arrays)
