"""A drafter in the target's process as a source of drafts: alone, mixed with suffix decoding, or on trial.

Created by `targets/loading/rank_loader.py`, called by `cpu_runner.py`.

Legend: N rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.inputs.proposals import Proposals
from ....drafter.step.inputs.row_layout import StepRows
from ....drafter.step.request_states import RequestStates
from ....drafter.suffix.mixing import SuffixMixer
from ..model.tensor_parallel import Communicator
from .runner_interface import Drafter


class DraftProposer(Protocol):
    """A drafter and its pages: that of `drafter/dflash/proposer.py` or `drafter/eagle3/proposer.py`."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals: ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None: ...

    def with_drafter(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with another drafter of the same shape, over the same pages."""
        ...

    def with_own_pages(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with a drafter of the same shape, with the same page ids in its own memory."""
        ...


class ColocatedDrafter:
    """A colocated drafter as a source of drafts, or a drafter and a candidate on trial.

        plan ─┬─ requests of the drafter ──▶ drafts ─┐
              └─ those on trial ─▶ candidate drafts ─┴─▶ drafts [R, K]
        taps ───▶ context of both for all requests: the same page ids, each in memory of its own

    They are whole on every rank and use the target's sharded embedding and head. Both have the context of all
    requests, so either can be removed between two steps without recomputing a token. Created by
    `targets/loading/rank_loader.py`.
    """

    def __init__(
        self, proposer: DraftProposer, communicator: Communicator, mixer: SuffixMixer | None = None
    ) -> None:
        self._proposer = proposer
        self._communicator = communicator
        self._mixer = mixer
        self._is_sharded = communicator.world_size > 1
        self._candidate: DraftProposer | None = None
        self._on_trial: set[int] = set()  # slots

    def swap_drafter(self, drafter: Drafter) -> None:
        self._proposer = self._proposer.with_drafter(drafter)
        if self._mixer is not None:
            self._mixer.on_drafter_replaced()

    def begin_trial(self, drafter: Drafter) -> None:
        """Add a candidate. Running requests keep their drafter."""
        self._candidate = self._proposer.with_own_pages(drafter)
        self._on_trial.clear()

    def end_trial(self, *, promoted: bool) -> None:
        if promoted and self._candidate is not None:
            self._proposer = self._candidate
            if self._mixer is not None:
                self._mixer.on_drafter_replaced()
        self._candidate = None

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._mixer is None:
            proposals = self._propose(plan, states)
        else:
            proposals = self._propose_mixed(self._mixer, plan, states)
        return broadcast_proposals(proposals, self._communicator) if self._is_sharded else proposals

    def _propose_mixed(self, mixer: SuffixMixer, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        skips = mixer.copy(plan, states) and self._candidate is None  # a trial compares all passes
        if (
            self._is_sharded and plan.num_draft_tokens
        ):  # ranks may differ in the last digits of their estimates
            skips = bool(self._communicator.broadcast(torch.tensor([int(skips)], device=states.device)))
        if not skips:
            return mixer.mix(self._propose(plan, states), plan, states.device)
        self._propose(_plan_where(plan, np.zeros(plan.num_requests, dtype=np.bool_)), states)
        return mixer.mix(None, plan, states.device)

    def _propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._candidate is None:
            return self._proposer.propose(plan, states)
        return self._propose_on_trial(self._candidate, plan, states)

    def _propose_on_trial(
        self, candidate: DraftProposer, plan: SchedulerOutput, states: RequestStates
    ) -> Proposals:
        """Return drafts of both drafters, each for its requests."""
        for request in plan.admitted:
            (self._on_trial.add if request.on_trial else self._on_trial.discard)(request.slot)
        on_trial_R = np.isin(plan.slots, list(self._on_trial))
        current = self._proposer.propose(_plan_where(plan, ~on_trial_R), states)
        tried = candidate.propose(_plan_where(plan, on_trial_R), states)
        return _merge(current, tried, torch.from_numpy(on_trial_R))

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "a target with a drafter has taps"
        self._proposer.inject(taps_NmH, rows, num_tokens_R)
        if self._candidate is not None:
            self._candidate.inject(taps_NmH, rows, num_tokens_R)


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


def _plan_where(plan: SchedulerOutput, drafts_R: np.ndarray) -> SchedulerOutput:
    """Return the plan in which only these requests draft."""
    return plan.with_num_drafts(np.where(drafts_R, plan.num_drafts, 0).astype(np.int32))


def _merge(current: Proposals, candidate: Proposals, on_trial_R: Tensor) -> Proposals:
    """Return the candidate's proposals for requests on trial, and the current drafter's for all others."""
    width = max(current.drafts_RK.shape[1], candidate.drafts_RK.shape[1])
    on_trial_R1 = on_trial_R.to(current.drafts_RK.device).unsqueeze(1)
    drafts_RK = torch.where(
        on_trial_R1, _pad_columns(candidate.drafts_RK, width, -1), _pad_columns(current.drafts_RK, width, -1)
    )
    of_trees = current.candidates + candidate.candidates
    if not width or (current.margins_RK is None and candidate.margins_RK is None):
        return Proposals(drafts_RK, None, candidates=of_trees)
    current_RK, candidate_RK = (
        torch.full(drafts_RK.shape, torch.nan, device=drafts_RK.device)
        if each.margins_RK is None
        else _pad_columns(each.margins_RK, width, torch.nan)
        for each in (current, candidate)
    )
    margins_RK = torch.where(on_trial_R1, candidate_RK, current_RK)
    return Proposals(drafts_RK, margins_RK, candidates=of_trees)


def _pad_columns(values_RK: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(values_RK, (0, width - values_RK.shape[1]), value=fill)
