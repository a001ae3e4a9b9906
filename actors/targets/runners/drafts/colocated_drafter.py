"""A drafter in the target's process as a source of drafts: alone, or mixed with suffix decoding.

Created by `targets/loading/rank_loader.py`, called by `cpu_runner.py`.

Legend: N rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .....cluster.step.scheduler_output import SchedulerOutput
from .....drafter.step.inputs.proposals import Proposals
from .....drafter.step.inputs.row_layout import StepRows
from .....drafter.step.request_states import RequestStates
from .....drafter.suffix.mixing import SuffixMixer
from ...model.tensor_parallel import Communicator
from .draft_source import Drafter


class DraftProposer(Protocol):
    """A drafter and its pages: that of `drafter/dflash/proposer.py` or `drafter/eagle3/proposer.py`."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals: ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None: ...

    def with_drafter(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with another drafter of the same shape, over the same pages."""
        ...


class ColocatedDrafter:
    """A colocated drafter as a source of drafts.

    It is whole on every rank and uses the target's sharded embedding and head.
    """

    def __init__(
        self, proposer: DraftProposer, communicator: Communicator, mixer: SuffixMixer | None = None
    ) -> None:
        self._proposer = proposer
        self._communicator = communicator
        self._mixer = mixer
        self._is_sharded = communicator.world_size > 1

    def swap_drafter(self, drafter: Drafter) -> None:
        self._proposer = self._proposer.with_drafter(drafter)
        if self._mixer is not None:
            self._mixer.on_drafter_replaced()

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._mixer is None:
            proposals = self._proposer.propose(plan, states)
        else:
            proposals = self._propose_mixed(self._mixer, plan, states)
        return broadcast_proposals(proposals, self._communicator) if self._is_sharded else proposals

    def _propose_mixed(self, mixer: SuffixMixer, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        skips_pass = mixer.copy(plan, states)
        if self._is_sharded and plan.num_draft_tokens:
            # Ranks may differ in the last digits of their estimates, so rank 0 decides.
            decision = torch.tensor([int(skips_pass)], device=states.device)
            skips_pass = bool(self._communicator.broadcast(decision))
        if not skips_pass:
            return mixer.mix(self._proposer.propose(plan, states), plan, states.device)
        # By a plan without drafts the proposer learns that it makes no pass in this step.
        no_drafts = np.zeros(plan.num_requests, dtype=np.int32)
        self._proposer.propose(plan.with_num_drafts(no_drafts), states)
        return mixer.mix(None, plan, states.device)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "a target with a drafter has taps"
        self._proposer.inject(taps_NmH, rows, num_tokens_R)


def broadcast_proposals(proposals: Proposals, communicator: Communicator) -> Proposals:
    """Broadcast rank 0's proposals. Their shape, and whether they have margins, is equal on all ranks."""
    drafts_RK, margins_RK = proposals.drafts_RK, proposals.margins_RK
    if communicator.world_size == 1 or not drafts_RK.numel():
        return proposals
    if margins_RK is None:
        return replace(proposals, drafts_RK=communicator.broadcast(drafts_RK))
    both_2RK = torch.stack((drafts_RK.int(), margins_RK.view(torch.int32)))
    drafts_RK, margins_RK = communicator.broadcast(both_2RK).unbind(0)
    return replace(proposals, drafts_RK=drafts_RK.long(), margins_RK=margins_RK.view(torch.float32))
