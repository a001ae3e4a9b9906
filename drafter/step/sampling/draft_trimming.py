"""Trims drafts: chooses how many to verify (`cluster/speculation/draft_trimming.py`) and removes the others.

The definition, on any device; `step/cpu_numba/draft_trimming.py` counts in one call,
`step/gpu_triton/draft_trimming.py` does both in a kernel. Called by `actors/targets/runners/cpu_runner.py`.

Legend: R requests, K most drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....cluster.speculation.draft_trimming import trimmed
from ....cluster.step.scheduler_output import IntArray, SchedulerOutput


def trim(margins_RK: Tensor, plan: SchedulerOutput) -> IntArray:
    """Return the number of verified drafts of each request, int32 [R]. Margins are fp32 [R, K]."""
    assert plan.trim is not None, "asked where drafts are cut"
    num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
    return trimmed(margins_RK.cpu().numpy(), plan.num_drafts, num_other_rows, plan.trim)


def take_out(drafts_RK: Tensor, num_drafts_R: Tensor) -> Tensor:
    """Return the drafts [R, K] with -1 after the first `num_drafts` of each request."""
    columns_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    return drafts_RK.masked_fill(columns_K >= num_drafts_R.unsqueeze(1), -1)
