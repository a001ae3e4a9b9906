"""What a GPU worker knows of the running requests, all of it on the device; and the inputs of a step.

The twin of `drafter/step/states.py`, whose indices come from the host: here the host says only who takes part
and with how many rows (`StepInputs`); positions, tokens and slots are found by kernels, so that a step can be
launched before the host knows what the last one brought: `num_computed` advances with every step. Used by
`actors/targets/runners/device.py`.

Legend: B requests of a step, N rows, X sampled rows, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.plan import AdmittedRequest, SchedulerOutput
from ...compute.kv_cache import skip_slot
from .rows import SlotTables
from .sampling_state import SamplingState

Ints = NDArray[np.int32]
MAX_STOP_TOKEN_IDS = 128  # of a request: a row of the table that kernels read


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Who takes part in a step; int32 tensors on the device, and what the host knows of them.

    Attributes:
        slots_B, cu_rows_B1, num_drafts_B: requests, rows before each, drafts among their last rows.
        samples_B: 1 where tokens come back.
        first_chosen_B: where a sampling request's verdicts begin among all sampled rows.
        num_rows: N, padding included.
        max_rows, max_drafts: no request has more.
    """

    slots_B: Tensor
    cu_rows_B1: Tensor
    num_drafts_B: Tensor
    samples_B: Tensor
    first_chosen_B: Tensor
    num_rows: int
    max_rows: int
    max_drafts: int

    @staticmethod
    def num_values(num_requests: int) -> int:
        """Integers that describe a step of so many requests."""
        return 5 * num_requests + 1

    @classmethod
    def over(cls, values: Tensor, num_requests: int, num_rows: int, max_rows: int, max_drafts: int):
        """Views of one buffer, in the order of `pack`."""
        b = num_requests
        parts = values[: cls.num_values(b)].split([b, b + 1, b, b, b])
        return cls(*parts, num_rows=num_rows, max_rows=max_rows, max_drafts=max_drafts)


def pack(slots: Ints, num_rows: Ints, num_drafts: Ints, samples: NDArray[np.bool_], width: int) -> Ints:
    """A step's integers for `width` requests; those behind the given ones have no rows."""
    missing = width - len(slots)
    rows = np.pad(num_rows, (0, missing))
    counts = np.pad(np.where(samples, 1 + num_drafts, 0), (0, missing))
    parts = (
        np.pad(slots, (0, missing)),
        np.concatenate(([0], np.cumsum(rows))),
        np.pad(num_drafts, (0, missing)),
        np.pad(samples, (0, missing)),
        np.cumsum(counts) - counts,
    )
    return np.concatenate(parts).astype(np.int32)


class DeviceStates:
    """Slots of running requests; see the module's text."""

    def __init__(
        self, num_slots: int, max_model_len: int, num_pages: int, page_size: int, device: torch.device | str
    ) -> None:
        self.device = torch.device(device)
        pages = -(-max_model_len // page_size)
        self._no_page = num_pages

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.tables = SlotTables(
            # One column more than the longest sequence: what must not be kept is written there.
            token_ids=full((num_slots, max_model_len + 1), 0, torch.int64),
            page_table=full((num_slots, pages), num_pages, torch.int32),
            num_computed=full((num_slots,), 0, torch.int32),
            page_size=page_size,
            skip_slot=skip_slot(num_pages, page_size),
        )
        self.sampling = SamplingState(
            temperature=full((num_slots,), 0, torch.float32),
            top_k=full((num_slots,), 0, torch.int32),
            top_p=full((num_slots,), 1, torch.float32),
            min_p=full((num_slots,), 0, torch.float32),
            seed=full((num_slots,), 0, torch.int64),
            min_length=full((num_slots,), 0, torch.int32),
            stop_ids=full((num_slots, MAX_STOP_TOKEN_IDS), -1, torch.int32),
        )
        self._filters_S = np.zeros(num_slots, dtype=np.bool_)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in admissions and new pages; comes first in a step."""
        for request in plan.admitted:
            self._admit(request)
        known = plan.num_computed >= 0
        if known.any():  # the plan knows it only where no step is in flight; otherwise it stands here
            stands = self._put(np.stack((plan.slots[known], plan.num_computed[known])))
            self.tables.num_computed[stands[0].long()] = stands[1]
        if len(plan.page_slots):
            entries = self._put(np.stack((plan.page_slots, plan.page_indices, plan.page_ids)))
            self.tables.page_table[entries[0].long(), entries[1].long()] = entries[2]

    def filters(self, plan: SchedulerOutput) -> bool:
        """Whether any request of the step has top-k, top-p or min-p."""
        return bool(self._filters_S[plan.slots].any())

    def _admit(self, request: AdmittedRequest) -> None:
        slot, sampling, state, tables = request.slot, request.sampling, self.sampling, self.tables
        tables.token_ids[slot, : len(request.token_ids)] = self._put(request.token_ids).long()
        # A sequence may end when its next step is planned already: rows beyond its pages go nowhere.
        tables.page_table[slot] = self._no_page
        state.temperature[slot] = sampling.temperature
        state.top_k[slot] = sampling.top_k
        state.top_p[slot] = sampling.top_p
        state.min_p[slot] = sampling.min_p
        state.seed[slot] = sampling.seed
        state.min_length[slot] = sampling.min_length
        stops = np.full(MAX_STOP_TOKEN_IDS, -1, dtype=np.int32)
        stops[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        state.stop_ids[slot] = self._put(stops)
        greedy = sampling.temperature <= 0 or sampling.top_k == 1
        narrows = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._filters_S[slot] = narrows and not greedy

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
