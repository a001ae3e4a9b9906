"""Drafts without a model: the tokens that followed an earlier occurrence of the sequence's last tokens.

See `step/sampling/ngram_lookup.py` for the look-up. It reads only the worker's mirror of token ids and keeps
no state, so preemption, prefix hits and ranks need no handling. Drafts have no margins; the scheduler
estimates acceptance from the request's history. Used only by `actors/targets/runners/cpu_runner.py`.

Legend: R requests of the step, K most drafts.
"""

from __future__ import annotations

from torch import Tensor

from ...cluster.step.scheduler_output import SchedulerOutput
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import StepRows
from ..step.request_states import RequestStates


class NgramProposer:
    """Copies drafts from earlier tokens.

    Args:
        shortest, longest: lengths of the token runs to match.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = shortest, longest

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return drafts [R, K], the same on all ranks."""
        if not plan.num_draft_tokens:
            return Proposals.none(plan.num_requests, states.device)
        return Proposals(states.look_up(plan, *self._lengths), None)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """Do nothing: there is no context but the tokens."""
