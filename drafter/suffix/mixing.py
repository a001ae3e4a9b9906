"""Mixes a drafter's drafts with suffix decoding's: a request verifies those expected to be accepted most.

Both kinds are judged by the tokens that were committed since, whichever of them was verified. So an
acceptance model of each kind (`cluster/speculation/acceptance_model.py`) is fitted on all steps in which it
drafted, and neither needs trials. The kind with the larger sum of survival probabilities is chosen; no token
depends on the choice, because verification is the same. Where drafts form trees, the chosen kind is a tree's
main path and the other one a branch of it (`cluster/speculation/draft_tree.py`).

Copies are made first. If for every request they are expected to be accepted so often that the drafter's last
passes would have added little, its pass is left out.

Chosen suffix drafts get the margins at which the drafter's own would have their probabilities, so the
scheduler's acceptance model, which sees one kind of margin, stays calibrated. Used by the runners'
`colocated_drafter.py` and, where a device drives the steps, `device_suffixes.py`; both broadcast rank 0's
result.

Legend: R requests of the step, D those that draft, K most drafts, S slots, P remembered passes.
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
from ..step.inputs.proposals import CopiedDrafts, Proposals
from ..step.inputs.row_layout import Ints
from .proposer import KnownTokens, SuffixProposer

# Bias, slope, position and temperature of suffix drafts that nothing is known about: a match of one token is
# right in one of three cases, one of eight tokens in four of five.
_SUFFIX_PRIOR = [-2.0, 1.5, 0.0, -0.5]
_MIN_SLOPE = 0.1  # of log(1 + margin), where a probability is converted to a margin
_MAX_LOG_MARGIN = 4.0
# A pass is left out if, by each request's last `_NUM_PASSES`, it would add fewer accepted drafts than this
# share of the tokens that copies are expected to give; a pass takes a larger share of a step. At least
# `_MIN_PASSES` must be known, of its planned drafts `_MIN_COPIED` must be expected to be accepted (chance
# matches are short), and after `_MAX_SKIPPED` steps a pass is made again.
_MAX_GAIN, _NUM_PASSES, _MIN_PASSES, _MIN_COPIED, _MAX_SKIPPED = 0.05, 8, 2, 0.5, 16


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
        self.drop(slots_R)

    def drop(self, slots_R: IntArray) -> None:
        """Keep no drafts of these slots."""
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


class _PassGains:
    """Estimates what another pass of the drafter would add to copies, by what its last passes were worth."""

    def __init__(self, num_slots: int) -> None:
        self._expected_SP = np.zeros((num_slots, _NUM_PASSES), dtype=np.float32)
        self._count_S = np.zeros(num_slots, dtype=np.int64)

    def forget(self, slots_R: IntArray) -> None:
        self._count_S[slots_R] = 0

    def add(self, slots_D: IntArray, expected_D: Floats) -> None:
        """Record the number of drafts of a pass that are expected to be accepted."""
        self._expected_SP[slots_D, self._count_S[slots_D] % _NUM_PASSES] = expected_D
        self._count_S[slots_D] += 1

    def are_small(self, slots_D: IntArray, copied_D: Floats) -> bool:
        """Return whether no request would gain from a pass if `copied_D` of its copies are accepted."""
        count_D1 = self._count_S[slots_D, None]
        more_DP = np.maximum(self._expected_SP[slots_D] - copied_D[:, None], 0.0)
        more_DP[np.arange(_NUM_PASSES) >= count_D1] = 0.0
        gain_D = more_DP.sum(axis=1) / np.clip(count_D1[:, 0], 1, _NUM_PASSES)
        return bool(((count_D1[:, 0] >= _MIN_PASSES) & (gain_D < _MAX_GAIN * (1.0 + copied_D))).all())


class _Copies(NamedTuple):
    """A step's suffix drafts, the parameters of their probabilities, and these."""

    candidates: _Candidates
    calibration: Trim
    survivals_RK: Floats

    def num_expected(self) -> Floats:
        """Return how many drafts of each request are expected to be accepted, fp32 [R]."""
        return self.survivals_RK.sum(axis=1)

    def with_chances(self) -> CopiedDrafts:
        before_RK = np.column_stack([np.ones(len(self.survivals_RK)), self.survivals_RK[:, :-1]])
        chances_RK = self.survivals_RK / np.maximum(before_RK, np.finfo(np.float32).tiny)
        return CopiedDrafts(self.candidates.drafts_RK, chances_RK.astype(np.float32))


class SuffixMixer:
    """Chooses between a drafter's drafts and suffix decoding's. Each step calls `copy`, then `mix`.

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
        self._gains = _PassGains(num_slots)
        self._num_skipped = 0  # steps since the drafter's last pass
        self._copies: _Copies | None = None

    def on_drafter_replaced(self) -> None:
        """Forget what was learned about the previous drafter."""
        self._drafted.acceptance.reset()
        self._gains.forget(np.arange(len(self._num_known_S), dtype=np.int32))

    def copy(self, plan: SchedulerOutput, states: KnownTokens) -> bool:
        """Make suffix drafts; return whether the drafter's pass would add too little to them."""
        copied = self._suffix.propose(plan, states)
        if plan.admitted:
            slots = np.array([request.slot for request in plan.admitted], dtype=np.int32)
            temperatures = [request.sampling.temperature for request in plan.admitted]
            self._drafted.admit(slots, temperatures)
            self._copied.admit(slots, temperatures)
            self._gains.forget(slots)
        if not plan.num_draft_tokens:
            self._copies = None
            return False
        self._judge(plan, states)
        assert copied.margins_RK is not None, "suffix drafts have margins"
        candidates = _Candidates(copied.drafts_RK.cpu().numpy(), copied.margins_RK.cpu().numpy())
        self._copied.keep(plan.slots, candidates)
        calibration = self._copied.calibration(plan.slots)
        self._copies = _Copies(candidates, calibration, _survivals(candidates, calibration))
        drafting_D = np.flatnonzero(plan.num_drafts)
        expected_D, planned_D = self._copies.num_expected()[drafting_D], plan.block_drafts[drafting_D]
        if self._num_skipped >= _MAX_SKIPPED or (expected_D < _MIN_COPIED * planned_D).any():
            return False
        return self._gains.are_small(plan.slots[drafting_D], expected_D)

    def mix(self, drafted: Proposals | None, plan: SchedulerOutput, device: torch.device) -> Proposals:
        """Return for each request the drafter's proposals (None: left out) or suffix decoding's."""
        copies = self._copies
        if drafted is None:
            if copies is None:
                return Proposals.none(plan.num_requests, device)
            return self._copies_alone(copies, plan, device)
        if copies is None or drafted.margins_RK is None:
            return drafted
        return self._choose(drafted, drafted.margins_RK, copies, plan)

    def _copies_alone(self, copies: _Copies, plan: SchedulerOutput, device: torch.device) -> Proposals:
        """Return the suffix drafts of all requests; the drafter's pass was left out."""
        self._drafted.drop(plan.slots)
        self._num_skipped += 1
        margins_RK = self._margins_as_own(copies, plan)
        drafts_RK, margins_RK = (
            torch.from_numpy(each).to(device) for each in (copies.candidates.drafts_RK, margins_RK)
        )
        return Proposals(
            drafts_RK,
            margins_RK,
            is_partial=True,
            is_copied_R=plan.num_drafts > 0,
            copies=copies.with_chances() if plan.needs_candidates else None,
            is_pass_skipped=True,
        )

    def _choose(
        self, drafted: Proposals, own_margins_RK: torch.Tensor, copies: _Copies, plan: SchedulerOutput
    ) -> Proposals:
        """Return for each request the drafts of which more are expected to be accepted."""
        own = _Candidates(drafted.drafts_RK.cpu().numpy(), own_margins_RK.cpu().numpy())
        own_expected_R = _survivals(own, self._drafted.calibration(plan.slots)).sum(axis=1)
        drafting_D = np.flatnonzero(plan.num_drafts)
        self._drafted.keep(plan.slots, own)
        self._gains.add(plan.slots[drafting_D], own_expected_R[drafting_D])
        self._num_skipped = 0
        is_copied_R = copies.num_expected() > own_expected_R
        # Marked as mixed even without a copy: rank 0 decides what is copied, so ranks may find differently.
        mixed = replace(
            drafted,
            is_partial=True,
            is_copied_R=is_copied_R,
            copies=copies.with_chances() if plan.needs_candidates else None,
        )
        if not is_copied_R.any():
            return mixed
        margins_RK = self._margins_as_own(copies, plan)
        return replace(
            mixed,
            drafts_RK=_where(is_copied_R, copies.candidates.drafts_RK, drafted.drafts_RK),
            margins_RK=_where(is_copied_R, margins_RK, own_margins_RK),
        )

    def _margins_as_own(self, copies: _Copies, plan: SchedulerOutput) -> Floats:
        """Return the margins at which the drafter's own drafts would have the copies' probabilities."""
        own = plan.trim or self._drafted.calibration(plan.slots)
        return _converted(copies.candidates.margins_RK, copies.calibration, own)

    def _judge(self, plan: SchedulerOutput, states: KnownTokens) -> None:
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


def _survivals(candidates: _Candidates, calibration: Trim) -> Floats:
    return survivals(candidates.margins_RK, candidates.num_drafts(), calibration)


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
