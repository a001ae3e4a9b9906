"""What a GPU worker knows of the running requests, all of it on the device.

The twin of `drafter/step/states.py`, whose indices come from the host: here the host says only who takes part
and with how many rows (`rows.StepRequests`); positions, tokens and slots are found by kernels, so that a step
can be launched before the host knows what the last one brought: `num_computed` advances with every step. Used
by `actors/targets/runners/device.py`.

Legend: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....cluster.page_groups import ONE_GROUP, PagePlan
from ....cluster.pages import pages_for
from ....cluster.plan import AdmittedRequest, SchedulerOutput
from ...compute.kv_cache import skip_slot
from .rows import Ints, SlotTables
from .sampling_state import SamplingState

MAX_STOP_TOKEN_IDS = 128  # of a request: a row of the table that kernels read


class DeviceStates:
    """Slots of running requests; see the module's text.

    Args:
        num_pages: of each pool.
        pages: the models' page groups; one that all layers share by default.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device | str,
        pages: PagePlan = ONE_GROUP,
    ) -> None:
        self.device = torch.device(device)
        skipped = [num_pages[group.pool] for group in pages.groups]
        self._no_page_G1 = torch.tensor(skipped, dtype=torch.int32, device=self.device).unsqueeze(1)

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.tables = SlotTables(
            # One column more than the longest sequence: what must not be kept is written there.
            token_ids=full((num_slots, max_model_len + 1), 0, torch.int64),
            page_tables=self._no_page_G1.unsqueeze(2).repeat(
                1, num_slots, pages_for(max_model_len, page_size)
            ),
            num_computed=full((num_slots,), 0, torch.int32),
            page_size=page_size,
            skip_slots=torch.tensor(
                [skip_slot(count, page_size) for count in skipped], dtype=torch.int64, device=self.device
            ),
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
            columns = (plan.page_groups, plan.page_slots, plan.page_indices, plan.page_ids)
            groups, slots, indices, ids = self._put(np.stack(columns))
            self.tables.page_tables[groups.long(), slots.long(), indices.long()] = ids

    def filters(self, plan: SchedulerOutput) -> bool:
        """Whether any request of the step has top-k, top-p or min-p."""
        return bool(self._filters_S[plan.slots].any())

    def _admit(self, request: AdmittedRequest) -> None:
        slot, sampling, state, tables = request.slot, request.sampling, self.sampling, self.tables
        tables.token_ids[slot, : len(request.token_ids)] = self._put(request.token_ids).long()
        # A sequence may end when its next step is planned already: rows beyond its pages go nowhere.
        tables.page_tables[:, slot] = self._no_page_G1
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
