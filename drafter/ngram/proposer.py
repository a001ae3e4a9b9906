"""Drafting without a model: what followed the last tokens where they stood before.

The look-up is `step/sampling/ngram_lookup.py`'s. Nothing is computed, tapped or kept for it: a worker's
mirror of the tokens is all it needs, so preemptions, prefix hits and ranks ask nothing of it. It has no
opinion on how sure a draft is; what a request's drafts are worth the scheduler learns from its past. A source
of drafts as `actors/targets/runners/cpu_runner.py` has them, and used there alone.

Legend: R requests of the step, K most drafts.
"""

from __future__ import annotations

from torch import Tensor

from ...cluster.step.scheduler_output import SchedulerOutput
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import StepRows
from ..step.request_states import RequestStates


class NgramProposer:
    """Copies from the past.

    Args:
        shortest, longest: of the runs of tokens that are looked for.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = shortest, longest

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Drafts [R, K], the same on all ranks, for all know the same tokens."""
        if not plan.num_draft_tokens:
            return Proposals.none(plan.num_requests, states.device)
        return Proposals(states.look_up(plan, *self._lengths), None)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """There is no context but the tokens."""
