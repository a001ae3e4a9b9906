"""Request state on a GPU worker, kept entirely on the device.

The twin of `drafter/step/request_states.py`, which makes indices on the host. Here the host only says which
requests take part and with how many rows (`row_layout.DeviceStepRequests`); kernels derive positions, tokens
and slots. So a step can be launched before the host knows the result of the previous one: `num_computed`
advances on the device.

All tables are in one arena: a plan's admissions and new pages are word indices and new values (`changes`),
which `drafter/step/gpu_triton/inputs/transfers.py` uploads. Used by `actors/targets/runners/gpu_runner.py`.

Legend: S slots, G page groups, P pages of a request, A admitted requests, R all of a step, M new page-table
entries, or changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ....cluster.pages.kv_cache_groups import ONE_GROUP, KVCacheLayout, pages_for
from ....cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput
from ...compute.memory.kv_cache import skip_slot
from ..sampling.logprobs import LogprobSlots
from .inputs.row_layout import Ints, SlotTables
from .inputs.transfers import Arena
from .sampling.sampling_metadata import DeviceSamplingMetadata, RuleTables, rule_entries

MAX_STOP_TOKEN_IDS = 128  # per request: a row of the table that kernels read
_SAMPLING = {  # a value per slot
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "min_length": torch.int32,
}


Indices = NDArray[np.integer]


class DeviceStates:
    """State of the running requests by slot, in device memory.

    Args:
        num_pages: pages of each pool.
        pages: the models' page groups; by default one that all layers share.

    Attributes:
        tables, sampling: views of the arena that kernels read.
        states_S: recurrent state of each slot, if the target has them (`recurrent_states.py`).
        arena: int32, all tables' words.
        logprob_slots: requested log probabilities, on the host only.
        max_changes: changes of the admission of a longest sequence without rules.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device | str,
        pages: KVCacheLayout = ONE_GROUP,
    ) -> None:
        skipped = [num_pages[group.pool] for group in pages.groups]
        self._no_page_G = np.array(skipped, dtype=np.int32)
        table_shape = (len(pages.groups), num_slots, pages_for(max_model_len, page_size))
        self._arena = Arena(
            {
                # One more column than the longest sequence: discarded values are written there.
                "token_ids": ((num_slots, max_model_len + 1), torch.int32),
                "page_tables": (table_shape, torch.int32),
                "num_computed": ((num_slots,), torch.int32),
                "states": ((num_slots,), torch.int32),
                "stop_ids": ((num_slots, MAX_STOP_TOKEN_IDS), torch.int32),
                **{name: ((num_slots,), dtype) for name, dtype in _SAMPLING.items()},
                **RuleTables.shapes(num_slots),
            },
            device,
        )
        tables = self._arena.tables
        no_page_G = torch.from_numpy(self._no_page_G).to(device)
        tables["page_tables"].copy_(no_page_G[:, None, None].expand(table_shape))
        tables["stop_ids"].fill_(-1)
        tables["top_p"].fill_(1.0)
        self.tables = SlotTables(
            token_ids=tables["token_ids"],
            page_tables=tables["page_tables"],
            num_computed=tables["num_computed"],
            page_size=page_size,
            skip_slots=torch.tensor(
                [skip_slot(count, page_size) for count in skipped], dtype=torch.int64, device=device
            ),
        )
        self.sampling = DeviceSamplingMetadata(
            **{name: tables[name] for name in _SAMPLING},
            stop_ids=tables["stop_ids"],
            rules=RuleTables.of(self._arena),
            tables=self.tables,
        )
        of_groups = len(pages.groups) * table_shape[2]
        self.states_S = tables["states"]
        self.max_changes = max_model_len + of_groups + MAX_STOP_TOKEN_IDS + len(_SAMPLING) + 4
        self._filters_S = np.zeros(num_slots, dtype=np.bool_)
        self.logprob_slots = LogprobSlots(num_slots)

    @property
    def arena(self) -> torch.Tensor:
        return self._arena.words

    def changes(self, plan: SchedulerOutput) -> Ints:
        """Return word indices of the arena, all distinct, and their new values for a plan, int32 [M, 2]."""
        known_R = plan.num_computed >= 0
        # Only known to the plan if no step is in flight; otherwise the device's value is current.
        parts = [
            self._arena.entries("num_computed", (plan.slots[known_R],), plan.num_computed[known_R]),
            *self._page_entries(plan),
        ]
        for request in plan.admitted:
            parts += self._admit(request)
        words, values = zip(*parts, strict=True)
        return np.stack((np.concatenate(words), np.concatenate(values)), axis=1)

    def draft_changes(self, slots_M: Indices, positions_M: Indices, tokens_M: Indices) -> Ints:
        """Return changes as `changes` does, that write drafts after the known tokens of decoding requests."""
        return np.stack(self._arena.entries("token_ids", (slots_M, positions_M), tokens_M), axis=1)

    def filters(self, slots: Ints) -> bool:
        """Return whether any of these requests has filters or rules, or wants log probabilities."""
        return bool(self._filters_S[slots].any())

    def _page_entries(self, plan: SchedulerOutput) -> list[tuple[Ints, Ints]]:
        """Return the new entries of running requests and the whole rows of admitted ones."""
        slots_A = np.array([request.slot for request in plan.admitted], dtype=np.int32)
        place_S = np.full(len(self._filters_S), -1)
        place_S[slots_A] = np.arange(len(slots_A))
        place_M = place_S[plan.page_slots]
        where = (plan.page_groups, plan.page_slots, plan.page_indices)
        runs_M, enters_M = place_M < 0, place_M >= 0
        entries = self._arena.entries("page_tables", tuple(x[runs_M] for x in where), plan.page_ids[runs_M])
        if not len(slots_A):
            return [entries]
        groups, _, pages = self.tables.page_tables.shape
        # A sequence may end after its next step was planned: rows beyond its pages go to the skip slot.
        rows_GAP = np.repeat(self._no_page_G, len(slots_A) * pages).reshape(groups, -1, pages)
        new_entries = (plan.page_groups[enters_M], place_M[enters_M], plan.page_indices[enters_M])
        rows_GAP[new_entries] = plan.page_ids[enters_M]
        table_shape = (np.arange(groups)[:, None, None], slots_A[:, None], np.arange(pages))
        return [entries, self._arena.entries("page_tables", table_shape, rows_GAP)]

    def _admit(self, request: AdmittedRequest) -> list[tuple[Ints, Ints]]:
        slot, tokens, sampling = request.slot, request.token_ids, request.sampling
        greedy = sampling.temperature <= 0 or sampling.top_k == 1
        narrows = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        wants_logprobs = sampling.logprobs is not None
        self._filters_S[slot] = (narrows and not greedy) or sampling.rules is not None or wants_logprobs
        self.logprob_slots.admit(slot, sampling)
        stops = np.full(MAX_STOP_TOKEN_IDS, -1, dtype=np.int32)
        stops[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        entries = self._arena.entries
        state = 0 if request.state is None else request.state.state
        return [
            entries("token_ids", (slot, np.arange(len(tokens))), tokens),
            entries("stop_ids", (slot, np.arange(len(stops))), stops),
            entries("states", (slot,), state),
            *(entries(name, (slot,), getattr(sampling, name)) for name in _SAMPLING),
            *rule_entries(self._arena, slot, sampling.rules),
        ]
