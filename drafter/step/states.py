"""What a worker knows of the running requests, by slot: tokens, pages, sampling; and the rows of a step.

A mirror, not an authority: it changes only as plans and results say. Token ids live on the device, where
new ones are made; pages and sampling come from the host and stay there, so a step's indices are made with
NumPy and put on the device once. Used by target ranks and by a split drafter alike.

Order within a step: `apply(plan)`, drafter's `block_rows(plan, mask_id)`, `place_drafts(plan, drafts)`,
`rows(plan)`, `append(plan, token_ids, num_tokens)`.

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

from ...cluster.plan import AdmittedRequest, SchedulerOutput
from ..compute.backend import PlacedRows
from ..compute.eager.attention import AttentionBatch
from ..compute.kv_cache import skip_slot
from .loops import rows
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
        token_ids_N: the anchors', and the mask's everywhere else.
        mask_rows_X: which rows these are.
        sampling: how a proposal is chosen in each mask row: as the target will choose there.
        num_requests: R of the plan.
        places_X: place of each proposal in the flattened [R, K].
        max_drafts: K.
    """

    token_ids_N: Tensor
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
        self._now: _Step | None = None  # of the step under way

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
        step = self._step(plan)
        token_ids_N, positions_N, kv_slots_N, sampled_X, slots_X = self._lay_out(
            step.slots_R, step.first_R, step.rows_R, step.counts_R
        )
        return StepRows(
            token_ids_N=token_ids_N,
            positions_N=self._put(positions_N),
            kv_slots_N=self._put(kv_slots_N),
            batch=self._attention(step.slots_R, step.first_R, step.rows_R),
            sampled_X=self._put(sampled_X),
            counts_R=self._put(step.counts_R),
            sampling=self._sampling(slots_X, positions_N[sampled_X] + 1),
        )

    def block_rows(self, plan: SchedulerOutput, mask_id: int) -> BlockRows | None:
        """The drafter's rows, or None if nobody drafts."""
        step = self._step(plan)
        max_drafts = int(step.drafts_R.max(initial=0))
        if max_drafts == 0:
            return None
        who_B = np.flatnonzero(step.drafts_R)
        slots_B, anchor_B, drafts_B = step.slots_R[who_B], step.first_R[who_B], step.drafts_R[who_B]
        # All rows but the anchors are "sampled": a proposal comes of each.
        token_ids_N, positions_N, kv_slots_N, mask_rows_X, slots_X = self._lay_out(
            slots_B, anchor_B, drafts_B + 1, drafts_B
        )
        masks_X = self._put(mask_rows_X)
        return BlockRows(
            token_ids_N=token_ids_N.index_fill_(0, masks_X, mask_id),
            mask_rows_X=masks_X,
            positions_N=self._put(positions_N),
            kv_slots_N=self._put(kv_slots_N),
            batch=self._attention(slots_B, anchor_B, drafts_B + 1),
            sampling=self._sampling(slots_X, positions_N[mask_rows_X]),
            num_requests=plan.num_requests,
            places_X=self._put(rows.places(who_B, drafts_B, max_drafts)),
            max_drafts=max_drafts,
        )

    def place_drafts(self, plan: SchedulerOutput, drafts_RK: Tensor) -> None:
        """Write proposals behind the known tokens, where `rows` reads them; -1 marks what is none."""
        if drafts_RK.shape[1]:
            self._write(plan, drafts_RK, self._step(plan).drafts_R)

    def append(self, plan: SchedulerOutput, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Write the tokens that came out of the step over the drafts, and step on."""
        step, counts_R = self._step(plan), num_tokens_R.cpu().numpy()
        self._write(plan, token_ids_RW, counts_R)
        self._num_computed[step.slots_R] = step.begin_R + np.maximum(counts_R - 1, 0)
        self._now = None

    def _step(self, plan: SchedulerOutput) -> _Step:
        if self._now is None or self._now.plan is not plan:
            self._now = _Step.of(plan, self._num_computed)
        return self._now

    def _write(self, plan: SchedulerOutput, values_RW: Tensor, counts_R: Ints) -> None:
        """Write each request's first `counts` values behind its known tokens, but for negative ones."""
        step = self._step(plan)
        if self._host_tokens is not None:
            rows.write_tokens(self._host_tokens, step.slots_R, step.begin_R, counts_R, values_RW.numpy())
            return
        columns_W = torch.arange(values_RW.shape[1], device=self.device)
        columns_RW = self._put(step.begin_R).unsqueeze(1) + columns_W
        wanted_RW = (columns_W < self._put(counts_R).unsqueeze(1)) & (values_RW >= 0)
        columns_RW = torch.where(wanted_RW, columns_RW, self._max_len)
        self.token_ids[self._put(step.slots_R).unsqueeze(1), columns_RW] = values_RW

    def _lay_out(self, slots_R: Ints, first_R: Ints, rows_R: Ints, counts_R: Ints) -> tuple[Any, ...]:
        """Token ids [N], on the device; then what `rows.lay_out` returns."""
        places = (slots_R, first_R, rows_R, counts_R, self.page_table, self.page_size)
        if self._host_tokens is not None:
            token_ids_N, *layout = rows.lay_out_tokens(self._host_tokens, *places)
            return self._put(token_ids_N), *layout
        layout = rows.lay_out(*places)
        slots_N = self._put(np.repeat(slots_R, rows_R))
        return self.token_ids[slots_N, self._put(layout[0])], *layout

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


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan's numbers as int64, [R].

    Attributes:
        first_R: absolute position of each request's first row.
        begin_R: position behind its known tokens.
        counts_R: rows that are sampled.
    """

    plan: SchedulerOutput
    slots_R: Ints
    rows_R: Ints
    drafts_R: Ints
    first_R: Ints
    begin_R: Ints
    counts_R: Ints

    @classmethod
    def of(cls, plan: SchedulerOutput, num_computed_S: Ints) -> _Step:
        slots_R, rows_R, drafts_R = (x.astype(np.int64) for x in (plan.slots, plan.num_rows, plan.num_drafts))
        first_R = np.where(plan.num_computed < 0, num_computed_S[slots_R], plan.num_computed)
        begin_R, counts_R = first_R + rows_R - drafts_R, (drafts_R + 1) * plan.samples
        return cls(plan, slots_R, rows_R, drafts_R, first_R, begin_R, counts_R)
