"""Mixes a drafter's drafts with suffix decoding's: a request verifies those expected to be accepted most.

Both kinds are drafted in every step, and both are judged by the tokens that were committed since, whichever
of them was verified. So an acceptance model of each kind (`cluster/speculation/acceptance_model.py`) is
fitted on all steps, and neither needs trials. The kind with the larger sum of survival probabilities is
chosen; no token depends on the choice, because verification is the same.

Chosen suffix drafts get the margins at which the drafter's own would have their probabilities, so the
scheduler's acceptance model, which sees one kind of margin, stays calibrated. Used by
`actors/targets/runners/cpu_runner.py`, which broadcasts rank 0's result.

Legend: R requests of the step, D those that draft, K most drafts, S slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...cluster.speculation.acceptance_model import AcceptanceModel
from ...cluster.speculation.draft_trimming import MAX_MARGIN, Floats, survivals
from ...cluster.step.scheduler_output import IntArray, SchedulerOutput, Trim
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import Ints
from ..step.request_states import RequestStates
from .proposer import SuffixProposer

# Bias, slope, position and temperature of suffix drafts that nothing is known about: a match of one token is
# right in one of three cases, one of eight tokens in four of five.
_SUFFIX_PRIOR = [-2.0, 1.5, 0.0, -0.5]
_MIN_SLOPE = 0.1  # of log(1 + margin), where a probability is converted to a margin
_MAX_LOG_MARGIN = 4.0


class _Candidates(NamedTuple):
    """Drafts of one kind for the requests of a step, -1 and nan where there is none."""

    drafts_RK: Ints
    margins_RK: Floats

    def num_drafts(self) -> IntArray:
        """Return the number of drafts of each request, int32 [R]."""
        return (self.drafts_RK >= 0).sum(axis=1, dtype=np.int32)


class _CandidateSource:
    """The acceptance of one kind of drafts, learned from the tokens that were committed after them."""

    def __init__(self, max_drafts: int, num_slots: int) -> None:
        self.acceptance = AcceptanceModel(max_drafts, num_slots)
        self._drafts_SK = np.full((num_slots, max_drafts), -1, dtype=np.int64)
        self._margins_SK = np.full((num_slots, max_drafts), np.nan, dtype=np.float32)

    def admit(self, slots_R: IntArray, temperatures_R: list[float]) -> None:
        self.acceptance.admit(slots_R, temperatures_R)
        self._drafts_SK[slots_R] = -1

    def keep(self, slots_R: IntArray, candidates: _Candidates) -> None:
        """Keep a step's drafts until they are judged."""
        num_columns = candidates.drafts_RK.shape[1]
        self._drafts_SK[slots_R], self._margins_SK[slots_R] = -1, np.nan
        self._drafts_SK[slots_R, :num_columns] = candidates.drafts_RK
        self._margins_SK[slots_R, :num_columns] = candidates.margins_RK

    def judge(self, slots_D: IntArray, committed_DK: Ints) -> None:
        """Compare the kept drafts of these slots with the tokens in their places, -1 where there is none."""
        drafts_DK, margins_DK = self._drafts_SK[slots_D], self._margins_SK[slots_D]
        num_drafts_D = (drafts_DK >= 0).sum(axis=1, dtype=np.int32)
        num_judged_D = np.minimum(num_drafts_D, (committed_DK >= 0).sum(axis=1, dtype=np.int32))
        matches_DK = (drafts_DK == committed_DK) & (drafts_DK >= 0)
        num_accepted_D = np.cumprod(matches_DK, axis=1).sum(axis=1).astype(np.int32)
        some = num_judged_D > 0
        if some.any():
            self.acceptance.observe(
                slots_D[some],
                num_judged_D[some],
                num_accepted_D[some],
                np.ones(np.count_nonzero(some), dtype=np.bool_),
                num_drafts_D[some],
                margins_DK[some],
            )

    def calibration(self, slots_R: IntArray) -> Trim:
        """Return the parameters of the drafts' probabilities."""
        acceptance, ones_R = self.acceptance, np.ones(len(slots_R), dtype=np.float32)
        offsets_R, no_costs = acceptance.offsets(slots_R), np.zeros(0, dtype=np.float32)
        return Trim(acceptance.bias_K, acceptance.slope_K, offsets_R, ones_R, no_costs)


class SuffixMixer:
    """Chooses between a drafter's drafts and suffix decoding's.

    Args:
        max_drafts: most drafts of a request.
        num_slots: most running requests.
    """

    def __init__(self, suffix: SuffixProposer, max_drafts: int, num_slots: int) -> None:
        self._suffix = suffix
        self._max_drafts = max_drafts
        self._drafted = _CandidateSource(max_drafts, num_slots)
        self._copied = _CandidateSource(max_drafts, num_slots)
        prior = {**self._copied.acceptance.as_json(), "theta": _SUFFIX_PRIOR}
        self._copied.acceptance.read(prior)
        self._num_known_S = np.zeros(num_slots, dtype=np.int64)  # when the kept drafts were made

    def on_drafter_replaced(self) -> None:
        """Forget what was learned about the previous drafter."""
        self._drafted.acceptance.reset()

    def mix(self, drafted: Proposals, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return for each request the drafter's proposals or suffix decoding's."""
        copied = self._suffix.propose(plan, states)
        if plan.admitted:
            slots = np.array([request.slot for request in plan.admitted], dtype=np.int32)
            temperatures = [request.sampling.temperature for request in plan.admitted]
            self._drafted.admit(slots, temperatures)
            self._copied.admit(slots, temperatures)
        if not plan.num_draft_tokens or drafted.margins_RK is None:
            return drafted
        self._judge(plan, states)
        own = _Candidates(drafted.drafts_RK.cpu().numpy(), drafted.margins_RK.cpu().numpy())
        assert copied.margins_RK is not None, "suffix drafts have margins"
        other = _Candidates(copied.drafts_RK.cpu().numpy(), copied.margins_RK.cpu().numpy())
        self._drafted.keep(plan.slots, own)
        self._copied.keep(plan.slots, other)
        by_own, by_other = self._drafted.calibration(plan.slots), self._copied.calibration(plan.slots)
        is_copied_R = _expected_accepted(other, by_other) > _expected_accepted(own, by_own)
        if not is_copied_R.any():
            return replace(drafted, is_partial=True)  # as on all ranks, of which rank 0 decides
        margins_RK = _converted(other.margins_RK, by_other, plan.trim or by_own)
        return replace(
            drafted,
            drafts_RK=_where(is_copied_R, other.drafts_RK, drafted.drafts_RK),
            margins_RK=_where(is_copied_R, margins_RK, drafted.margins_RK),
            is_partial=True,
        )

    def _judge(self, plan: SchedulerOutput, states: RequestStates) -> None:
        """Learn from the tokens committed since the kept drafts of the requests that draft again."""
        drafting_D = np.flatnonzero(plan.num_drafts)
        slots_D, num_known_R = plan.slots[drafting_D], states.num_known(plan)
        committed_DK = np.full((len(drafting_D), self._max_drafts), -1, dtype=np.int64)
        for d, (r, slot) in enumerate(zip(drafting_D.tolist(), slots_D.tolist(), strict=True)):
            begin = int(self._num_known_S[slot])
            tokens = states.known_tokens(slot, begin, min(int(num_known_R[r]), begin + self._max_drafts))
            committed_DK[d, : len(tokens)] = tokens
        self._drafted.judge(slots_D, committed_DK)
        self._copied.judge(slots_D, committed_DK)
        self._num_known_S[plan.slots] = num_known_R


def _expected_accepted(candidates: _Candidates, calibration: Trim) -> Floats:
    return survivals(candidates.margins_RK, candidates.num_drafts(), calibration).sum(axis=1)


def _converted(margins_RK: Floats, source: Trim, to: Trim) -> Floats:
    """Return the margins at which `to` gives the probabilities that `source` gives at `margins_RK`."""
    num_columns = margins_RK.shape[1]
    log_margins_RK = np.log1p(np.minimum(margins_RK, MAX_MARGIN))
    log_odds_RK = source.bias_R[:, None] + source.bias_K[:num_columns]
    log_odds_RK = log_odds_RK + source.slope_K[:num_columns] * log_margins_RK
    other_RK = log_odds_RK - to.bias_R[:, None] - to.bias_K[:num_columns]
    other_RK = other_RK / np.maximum(to.slope_K[:num_columns], _MIN_SLOPE)
    return np.expm1(np.clip(other_RK, 0.0, _MAX_LOG_MARGIN)).astype(np.float32)


def _where(
    is_copied_R: NDArray[np.bool_], copied_RK: NDArray[np.generic], own_RK: torch.Tensor
) -> torch.Tensor:
    device = own_RK.device
    is_copied_R1 = torch.from_numpy(is_copied_R).to(device).unsqueeze(1)
    return torch.where(is_copied_R1, torch.from_numpy(copied_RK).to(device, own_RK.dtype), own_RK)
