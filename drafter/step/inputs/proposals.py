"""What a source of drafts proposes for a step: tokens, and how sure each is. A value, made once per step.

A *margin* is how sure a proposal is: the best score minus the second best, as scores are judged, in units of
logits (`drafter/step/sampling/gumbel_argmax.py`, `drafter/step/sampling/sampler.py`). Target and drafter draw
the same noise, so a draft is refused where their logits differ by more than the margin. Margins cost drafts
at most: no token depends on them. Made by `dflash/proposer.py` and whoever else proposes; read by
`actors/targets/runners/cpu_runner.py`.

Legend: R requests of a step, K most drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of a step's requests, in their order.

    Attributes:
        drafts_RK: int64, -1 where a request drafts fewer than K.
        margins_RK: fp32, >= 0; inf where nothing else could be, nan where there is no draft or none that
            anybody was sure of. None: the source has no opinion.
    """

    drafts_RK: Tensor
    margins_RK: Tensor | None

    @classmethod
    def none(cls, num_requests: int, device: torch.device | str) -> Proposals:
        """Nobody drafts: K = 0."""
        return cls(torch.empty(num_requests, 0, dtype=torch.int64, device=device), None)
