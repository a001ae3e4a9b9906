"""Drafts proposed for a step, with their margins.

A *margin* is the drafter's best score minus its second best, in units of logits
(`drafter/step/sampling/gumbel_argmax.py`, `drafter/step/sampling/sampler.py`). Target and drafter use the
same noise, so a draft can be rejected only where their logits differ by more than the margin. Margins decide
which drafts are verified; no token depends on them. Made by proposers; read by
`actors/targets/runners/cpu_runner.py`.

Legend: R requests of a step, K most drafts, X rows that sample a draft, C candidates, P candidates of the row
before (or 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.step.scheduler_output import BoolArray, FloatArray


@dataclass(frozen=True, slots=True)
class BlockCandidates:
    """Candidates of the rows that sample a draft, request after request, for draft trees.

    Attributes:
        ids_XC: int64.
        scores_XPC: fp32, with filters and noise, given each candidate of the row before; P = 1 if scores do
            not depend on it. -inf where a token is impossible.
        counts_R: rows of each request of the step, int64.
    """

    ids_XC: Tensor
    scores_XPC: Tensor
    counts_R: Tensor


class CopiedDrafts(NamedTuple):
    """Drafts copied from earlier text beside a drafter's, for draft trees.

    Attributes:
        tokens_RK: int64, -1 past the last one.
        chances_RK: that each is accepted, given those before it; fp32.
    """

    tokens_RK: NDArray[np.int64]
    chances_RK: FloatArray


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of a step's requests, in their order.

    Attributes:
        drafts_RK: int64, -1 where a request drafts fewer than K.
        margins_RK: fp32, >= 0; inf if no other token is possible, nan if there is no draft or its margin
            is unknown. None: the proposer has no margins.
        is_partial: a request may have fewer drafts than were planned for it, as always without margins.
        is_copied_R: requests with copied drafts (`drafter/suffix/mixing.py`); None without a mixer.
        is_pass_skipped: all drafts are copies, and the drafter's pass was left out.
        candidates: of steps that grow draft trees, from each drafter that drafts for some of the requests.
        copies: of steps that grow draft trees, of all requests, chosen or not; None without a mixer.
    """

    drafts_RK: Tensor
    margins_RK: Tensor | None
    is_partial: bool = field(default=False, kw_only=True)
    is_copied_R: BoolArray | None = field(default=None, kw_only=True)
    is_pass_skipped: bool = field(default=False, kw_only=True)
    candidates: tuple[BlockCandidates, ...] = field(default=(), kw_only=True)
    copies: CopiedDrafts | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> Proposals:
        margins_RK = None if self.margins_RK is None else self.margins_RK.to(device)
        return replace(self, drafts_RK=self.drafts_RK.to(device), margins_RK=margins_RK)

    @classmethod
    def none(cls, num_requests: int, device: torch.device | str) -> Proposals:
        """Return empty proposals, K = 0."""
        return cls(torch.empty(num_requests, 0, dtype=torch.int64, device=device), None)
