"""Judging drafts: a drafted token stands iff it equals the token that the target chose there.

Equal-noise verification: the choice X_t (sampling.py) depends on the committed prefix, the request's seed
and the position alone, so the first mismatch is itself the right token, and a full match yields one more.
No loop over requests, no special case for greedy, no rejection sampler. Called by
`actors/targets/runners/host.py`.

Legend: X sampled rows, R requests, K most drafts, W = K + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .loops import rows


def accept(sampled_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens come out of a step.

    Args:
        sampled_X: the target's choices, request after request, in the order of rows.
        counts_R: how many of them each request has: 1 + its drafts, or 0 if nothing is sampled. int64.
        drafts_RK: proposals, -1 where there are fewer than K.

    Returns:
        token_ids [R, W], the new tokens of each request, then -1; and num_tokens [R]. Both int64.
    """
    if sampled_X.device.type == "cpu":
        return rows.accept(sampled_X.contiguous(), counts_R.contiguous(), drafts_RK.contiguous())
    num_requests, width = drafts_RK.shape[0], drafts_RK.shape[1] + 1
    if sampled_X.numel() == 0:
        return sampled_X.new_full((num_requests, width), -1), torch.zeros_like(counts_R)
    columns_W = torch.arange(width, device=counts_R.device)
    starts_R = counts_R.cumsum(0) - counts_R
    places_RW = (starts_R.unsqueeze(1) + columns_W).clamp_(max=sampled_X.numel() - 1)
    chosen_RW = sampled_X[places_RW]
    # A draft of -1 equals no token, so the run of matches ends at the latest where the drafts do.
    stood_RK = (chosen_RW[:, :-1] == drafts_RK).cumprod(dim=1)
    num_tokens_R = (stood_RK.sum(dim=1) + 1) * (counts_R > 0)
    return torch.where(columns_W < num_tokens_R.unsqueeze(1), chosen_RW, -1), num_tokens_R
