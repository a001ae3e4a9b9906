"""Verifies drafts: a draft is accepted if and only if it equals the token that the target samples there.

Equal-noise verification (drafter-invariant speculative decoding, arXiv 2408.07978): the sampled token X_t
(`sampler.py`) depends only on the committed prefix, the request's seed and the position. So the first
mismatch is itself the correct token, and a full match yields a bonus token. Needs no loop over requests, no
special case for greedy, no rejection sampler. The definition, on any device; `step/cpu_numba/verification.py`
and `step/gpu_triton/verification.py` are the same. Called by `actors/targets/runners/cpu_runner.py`.

Before that, `trim` chooses how many drafts to verify (`cluster/speculation/draft_trimming.py`), and
`take_out` removes the others.

Legend: X sampled rows, R requests, K most drafts, W = K + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....cluster.speculation.draft_trimming import drafts_to_verify
from ....cluster.step.scheduler_output import IntArray, SchedulerOutput
from ..inputs.row_layout import by_request


def accept(chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that a step produces.

    Args:
        chosen_X: the target's sampled tokens, request after request, in the order of rows.
        counts_R: sampled rows of each request: 1 + its drafts, or 0 if nothing is sampled. int64.
        drafts_RK: drafts, -1 where there are fewer than K.

    Returns:
        token_ids [R, W], the new tokens of each request, then -1; and num_tokens [R]. Both int64.
    """
    chosen_RW = by_request(chosen_X, counts_R, drafts_RK.shape[1] + 1)
    # A draft of -1 never equals the bonus token in its place, so the run of matches ends there.
    accepted_RK = (chosen_RW[:, :-1] == drafts_RK).cumprod(dim=1)
    num_tokens_R = (accepted_RK.sum(dim=1) + 1) * (counts_R > 0)
    columns_W = torch.arange(chosen_RW.shape[1], device=counts_R.device)
    return torch.where(columns_W < num_tokens_R.unsqueeze(1), chosen_RW, -1), num_tokens_R


def trim(margins_RK: Tensor, plan: SchedulerOutput) -> IntArray:
    """Return the number of verified drafts of each request, int32 [R]. Margins are fp32 [R, K]."""
    assert plan.trim is not None, "asked where drafts are cut"
    num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
    return drafts_to_verify(margins_RK.cpu().numpy(), plan.num_drafts, num_other_rows, plan.trim)


def take_out(drafts_RK: Tensor, num_drafts_R: Tensor) -> Tensor:
    """Return the drafts [R, K] with -1 after the first `num_drafts` of each request."""
    columns_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    return drafts_RK.masked_fill(columns_K >= num_drafts_R.unsqueeze(1), -1)
