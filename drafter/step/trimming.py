"""Cutting drafts: how many are verified (`cluster/speculation/draft_trimming.py`), and taking out the others.

The definition, on any device; `loops/trimming.py` does it in one call, `device/trimming.py` in a kernel.
Called by `actors/targets/runners/host.py`.

Legend: R requests, K most drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cluster.plan import IntArray, SchedulerOutput
from ...cluster.speculation.draft_trimming import trimmed


def trim(margins_RK: Tensor, plan: SchedulerOutput) -> IntArray:
    """How many drafts of each request are verified, int32 [R], by a plan that trims."""
    assert plan.trim is not None, "asked where drafts are cut"
    num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
    return trimmed(margins_RK.cpu().numpy(), plan.num_drafts, num_other_rows, plan.trim)


def take_out(drafts_RK: Tensor, num_drafts_R: Tensor) -> Tensor:
    """The drafts with -1 behind so many of each request."""
    columns_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    return drafts_RK.masked_fill(columns_K >= num_drafts_R.unsqueeze(1), -1)
