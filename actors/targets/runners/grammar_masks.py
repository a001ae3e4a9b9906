"""Grammars in steps of a device. The host makes the masks, so these steps wait for their drafts.

    draft ─▶ [wait: committed tokens, drafts ─▶ host] ─▶ drafts with forced tokens ─▶ verify ─▶ sample ─▶ ..
    (graph)                                           └─▶ masks ─▶ their memory ──────┘        (graph)

Draft trees of requests with grammars are grown again on the host, before their nodes are trimmed.

Steps without a grammar are not affected: they run ahead. docs/decisions/grammars.md says why these do not.
Called by `gpu_runner.py`; `step_passes.py` applies masks and drafts.

Legend: G requests of one iteration, K most drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from .drafts.device_trees import TreeMemory
from .drafts.draft_source import StepMemory

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates, StepWalks
    from ....drafter.grammars.token_bitmasks import RowMasks

Indices = NDArray[np.intp]
Ints = NDArray[np.int64]


class NoGrammars:
    """Restricts no request; the base class of `DeviceGrammars`.

    Attributes:
        states: the grammars of the requests; None if none can have one.
    """

    states: GrammarStates | None = None

    def admit(self, plan: SchedulerOutput) -> None:
        """Take the grammars of admitted requests."""

    def restricts(self, plan: SchedulerOutput, requests_G: Indices) -> bool:
        """Return whether a grammar restricts any of these requests of a plan in this step."""
        return False

    def write(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        verified: DeviceStepRequests,
        trees: TreeMemory | None,
    ) -> None:
        """Write the masks that a decoding step's pass reads. Waits for the device.

        Args:
            verified: the requests with the drafts to verify.
            trees: drafts that may form trees, which are grown again as the grammars allow.
        """

    def clear(self) -> None:
        """Let the next pass sample without masks."""

    def of_prompts(
        self, plan: SchedulerOutput, requests_G: Indices, requests: DeviceStepRequests
    ) -> DeviceMasks | None:
        """Return the masks of prompts' sampled rows; None if no grammar restricts them."""
        return None


NO_GRAMMARS = NoGrammars()


class DeviceGrammars(NoGrammars):
    """The grammars of a rank's requests.

    Args:
        masks: of decoding steps' rows.
        forces: whether forced tokens replace drafts; not with a remote drafter, which would keep its own.
    """

    def __init__(
        self, grammars: GrammarStates, memory: StepMemory, masks: DeviceMasks, *, forces: bool
    ) -> None:
        self.states = self._grammars = grammars
        self._tables, self._communicator = memory.states.tables, memory.communicator
        self._masks, self._forces, self._is_written = masks, forces, False

    def admit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._grammars.admit(request.slot, request.sampling.grammar)

    def restricts(self, plan: SchedulerOutput, requests_G: Indices) -> bool:
        if not self._grammars.slots:
            return False
        return self._grammars.holds(plan.slots[requests_G][plan.samples[requests_G]])

    def write(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        verified: DeviceStepRequests,
        trees: TreeMemory | None,
    ) -> None:
        walks = None if trees is None else self._grow(plan, requests_G, trees)
        masks = self._rows(plan, requests_G, verified, walks)
        if masks is not None:
            self._masks.write(masks)
            self._is_written = True

    def clear(self) -> None:
        if self._is_written:
            self._masks.clear()
            self._is_written = False

    def of_prompts(
        self, plan: SchedulerOutput, requests_G: Indices, requests: DeviceStepRequests
    ) -> DeviceMasks | None:
        if not self.restricts(plan, requests_G):
            return None
        masks = self._rows(plan, requests_G, requests, None)
        num_sampled = int(plan.samples[requests_G].sum())
        return None if masks is None else DeviceMasks.of(masks, num_sampled, self._tables.token_ids.device)

    def _grow(self, plan: SchedulerOutput, requests_G: Indices, trees: TreeMemory) -> StepWalks | None:
        """Grow the trees of requests with grammars again, restricted by these."""
        slots_G, begin_G = self._slots_and_num_known(plan, requests_G)
        drafts_G = np.zeros((len(slots_G), 0), dtype=np.int64)
        counts_G = plan.samples[requests_G].astype(np.int64)
        walks = self._grammars.walk(slots_G, begin_G, counts_G, drafts_G, self._read)
        if walks is None:
            return None
        restrictions = {walk.place: self._grammars.tree_restriction(walk.slot) for walk in walks.walks}
        return replace(walks, trees=trees.regrow(plan, requests_G, restrictions, self._communicator))

    def _rows(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        verified: DeviceStepRequests,
        walks: StepWalks | None,
    ) -> RowMasks | None:
        """Replace drafts by forced tokens, and return the masks of the rows.

        Args:
            walks: result of `_grow`, if drafts may form trees.
        """
        drafts_G = verified.num_drafts_R[: len(requests_G)].cpu().numpy().astype(np.int64)
        if walks is not None:
            return self._grammars.masks(walks, (drafts_G + 1) * plan.samples[requests_G])
        tables, (slots_G, begin_G) = self._tables, self._slots_and_num_known(plan, requests_G)
        slots = torch.from_numpy(slots_G).to(tables.token_ids.device)
        last = tables.token_ids.shape[1] - 1  # unused column, where values that must not be kept are written
        columns_K = np.arange(int(drafts_G.max(initial=0)))
        is_draft_GK = columns_K < drafts_G[:, None]
        columns_GK = np.where(is_draft_GK, begin_G[:, None] + columns_K, last)
        places = slots[:, None], torch.from_numpy(columns_GK).to(slots.device)
        drafts_GK = tables.token_ids[places].cpu().numpy().astype(np.int64)
        masks = self._grammars.constrain_drafts(
            slots_G,
            begin_G,
            (drafts_G + 1) * plan.samples[requests_G],
            drafts_GK,
            self._read,
            forces=self._forces,
        )
        if masks is None:
            return None
        if self._forces and len(columns_K):
            tables.token_ids[places] = torch.from_numpy(drafts_GK).to(slots.device, torch.int32)
        return masks

    def _slots_and_num_known(self, plan: SchedulerOutput, requests_G: Indices) -> tuple[Ints, Ints]:
        """Return the slots and the numbers of known tokens [G]."""
        arrays = (plan.slots, plan.num_rows, plan.num_drafts)
        slots_G, rows_G, planned_G = (x[requests_G].astype(np.int64) for x in arrays)
        num_computed = self._tables.num_computed
        slots = torch.from_numpy(slots_G).to(num_computed.device)
        return slots_G, num_computed[slots].cpu().numpy() + rows_G - planned_G

    def _read(self, slot: int, begin: int, end: int) -> list[int]:
        return self._tables.token_ids[slot, begin:end].tolist()
