"""Grammars in steps of a device. The host makes the masks, so these steps wait for their drafts.

    draft ─▶ [wait: committed tokens, drafts ─▶ host] ─▶ drafts with forced tokens ─▶ verify ─▶ sample ─▶ ..
    (graph)                                           └─▶ masks ─▶ their memory ──────┘        (graph)

Draft trees of requests with grammars are grown again on the host, before their nodes are trimmed.

Steps without a grammar are not affected: they run ahead. docs/decisions/grammars.md says why these do not.
Called by `gpu_runner.py`; `step_passes.py` applies masks and drafts.

Legend: G requests of one iteration, K most drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ..model.tensor_parallel import Communicator
from .drafts.device_trees import TreeMemory

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates, StepWalks
    from ....drafter.grammars.token_bitmasks import RowMasks

Indices = NDArray[np.intp]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceGrammarMasks:
    """The grammars of a rank's requests.

    Attributes:
        forces: whether forced tokens replace drafts; not with a remote drafter, which would keep its own.
    """

    grammars: GrammarStates
    states: DeviceStates
    forces: bool

    def admit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self.grammars.admit(request.slot, request.sampling.grammar)

    def holds(self, plan: SchedulerOutput, requests_G: Indices) -> bool:
        """Return whether a grammar restricts any of these requests of a plan in this step."""
        return self.grammars.holds(plan.slots[requests_G][plan.samples[requests_G]])

    def restrict(
        self, plan: SchedulerOutput, requests_G: Indices, trees: TreeMemory, communicator: Communicator
    ) -> StepWalks | None:
        """Grow the trees of requests with grammars again, restricted by these. Waits for the device."""
        slots_G, begin_G = self._slots_and_num_known(plan, requests_G)
        drafts_G = np.zeros((len(slots_G), 0), dtype=np.int64)
        counts_G = plan.samples[requests_G].astype(np.int64)
        walks = self.grammars.walk(slots_G, begin_G, counts_G, drafts_G, self._read)
        if walks is None:
            return None
        restrictions = {walk.place: self.grammars.tree_restriction(walk.slot) for walk in walks.walks}
        return replace(walks, trees=trees.regrow(plan, requests_G, restrictions, communicator))

    def masks(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        verified: DeviceStepRequests,
        walks: StepWalks | None = None,
    ) -> RowMasks | None:
        """Replace drafts by forced tokens, and return the masks of the rows. Waits for the device.

        Args:
            verified: the requests with the drafts to verify.
            walks: result of `restrict`, if drafts may form trees.
        """
        drafts_G = verified.num_drafts_R[: len(requests_G)].cpu().numpy().astype(np.int64)
        if walks is not None:
            return self.grammars.masks(walks, (drafts_G + 1) * plan.samples[requests_G])
        tables, (slots_G, begin_G) = self.states.tables, self._slots_and_num_known(plan, requests_G)
        slots = torch.from_numpy(slots_G).to(tables.token_ids.device)
        last = tables.token_ids.shape[1] - 1  # unused column, where values that must not be kept are written
        columns_K = np.arange(int(drafts_G.max(initial=0)))
        is_draft_GK = columns_K < drafts_G[:, None]
        columns_GK = np.where(is_draft_GK, begin_G[:, None] + columns_K, last)
        places = slots[:, None], torch.from_numpy(columns_GK).to(slots.device)
        drafts_GK = tables.token_ids[places].cpu().numpy().astype(np.int64)
        masks = self.grammars.constrain_drafts(
            slots_G,
            begin_G,
            (drafts_G + 1) * plan.samples[requests_G],
            drafts_GK,
            self._read,
            forces=self.forces,
        )
        if masks is None:
            return None
        if self.forces and len(columns_K):
            tables.token_ids[places] = torch.from_numpy(drafts_GK).to(slots.device, torch.int32)
        return masks

    def _slots_and_num_known(self, plan: SchedulerOutput, requests_G: Indices) -> tuple[Ints, Ints]:
        """Return the slots and the numbers of known tokens [G]."""
        arrays = (plan.slots, plan.num_rows, plan.num_drafts)
        slots_G, rows_G, planned_G = (x[requests_G].astype(np.int64) for x in arrays)
        slots = torch.from_numpy(slots_G).to(self.states.tables.num_computed.device)
        return slots_G, self.states.tables.num_computed[slots].cpu().numpy() + rows_G - planned_G

    def _read(self, slot: int, begin: int, end: int) -> list[int]:
        return self.states.tables.token_ids[slot, begin:end].tolist()
