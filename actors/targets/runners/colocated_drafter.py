"""Colocated drafters as a source of drafts: one drafter, or a drafter and a candidate on trial.

    plan ─┬─ requests of the drafter ──▶ drafts ─┐
          └─ those on trial ─▶ candidate drafts ─┴─▶ drafts [R, K]
    taps ───▶ context of both for all requests: the same page ids, each in memory of its own

Both have the context of all requests, so either can be removed between two steps without recomputing a token.
Used by `host.StepRunner`; created by `targets/loading/rank_loader.py`.

Legend: N rows, R requests, K most drafts, m taps, H hidden.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.inputs.proposals import Proposals
from ....drafter.step.inputs.row_layout import StepRows
from ....drafter.step.request_states import RequestStates
from ..model.tensor_parallel import Communicator
from .runner_interface import Drafter


class DraftProposer(Protocol):
    """A drafter and its pages: that of `drafter/dflash/proposer.py` or `drafter/eagle3/proposer.py`."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals: ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None: ...

    def with_drafter(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with another drafter of the same shape, over the same pages."""
        ...

    def beside(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with a drafter of the same shape, with the same page ids in its own memory."""
        ...


class ColocatedDrafter:
    """Colocated drafters, whole on every rank; they use the target's sharded embedding and head."""

    def __init__(self, proposer: DraftProposer, communicator: Communicator) -> None:
        self._proposer = proposer
        self._communicator = communicator
        self._candidate: DraftProposer | None = None
        self._on_trial: set[int] = set()  # slots

    def exchange(self, drafter: Drafter) -> None:
        self._proposer = self._proposer.with_drafter(drafter)

    def begin_trial(self, drafter: Drafter) -> None:
        """Add a candidate. Running requests keep their drafter."""
        self._candidate = self._proposer.beside(drafter)
        self._on_trial.clear()

    def end_trial(self, *, promoted: bool) -> None:
        if promoted and self._candidate is not None:
            self._proposer = self._candidate
        self._candidate = None

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._candidate is None:
            return share(self._proposer.propose(plan, states), self._communicator)
        for request in plan.admitted:
            (self._on_trial.add if request.on_trial else self._on_trial.discard)(request.slot)
        on_trial_R = np.isin(plan.slots, list(self._on_trial))
        current = self._proposer.propose(_plan_where(plan, ~on_trial_R), states)
        candidate = self._candidate.propose(_plan_where(plan, on_trial_R), states)
        return share(_merge(current, candidate, torch.from_numpy(on_trial_R)), self._communicator)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "a target with a drafter has taps"
        self._proposer.inject(taps_NmH, rows, num_tokens_R)
        if self._candidate is not None:
            self._candidate.inject(taps_NmH, rows, num_tokens_R)


def share(proposals: Proposals, communicator: Communicator) -> Proposals:
    """Broadcast rank 0's proposals. Their shape, and whether they have margins, is equal on all ranks."""
    drafts_RK, margins_RK = proposals.drafts_RK, proposals.margins_RK
    if communicator.world_size == 1 or not drafts_RK.numel():
        return proposals
    if margins_RK is None:
        return Proposals(communicator.broadcast(drafts_RK), None)
    both_2RK = torch.stack((drafts_RK.int(), margins_RK.view(torch.int32)))
    drafts_RK, margins_RK = communicator.broadcast(both_2RK).unbind(0)
    return Proposals(drafts_RK.long(), margins_RK.view(torch.float32))


def _plan_where(plan: SchedulerOutput, drafts_R: np.ndarray) -> SchedulerOutput:
    """Return the plan in which only these requests draft."""
    return plan.verifying(np.where(drafts_R, plan.num_drafts, 0).astype(np.int32))


def _merge(current: Proposals, candidate: Proposals, on_trial_R: Tensor) -> Proposals:
    """Return the candidate's proposals for requests on trial, and the current drafter's for all others."""
    width = max(current.drafts_RK.shape[1], candidate.drafts_RK.shape[1])
    on_trial_R1 = on_trial_R.to(current.drafts_RK.device).unsqueeze(1)
    drafts_RK = torch.where(
        on_trial_R1, _pad_columns(candidate.drafts_RK, width, -1), _pad_columns(current.drafts_RK, width, -1)
    )
    if not width or (current.margins_RK is None and candidate.margins_RK is None):
        return Proposals(drafts_RK, None)
    current_RK, candidate_RK = (
        torch.full(drafts_RK.shape, torch.nan, device=drafts_RK.device)
        if each.margins_RK is None
        else _pad_columns(each.margins_RK, width, torch.nan)
        for each in (current, candidate)
    )
    return Proposals(drafts_RK, torch.where(on_trial_R1, candidate_RK, current_RK))


def _pad_columns(values_RK: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(values_RK, (0, width - values_RK.shape[1]), value=fill)
