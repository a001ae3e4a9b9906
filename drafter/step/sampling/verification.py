"""Judging drafts: a drafted token stands iff it equals the token that the target chose there.

Equal-noise verification: the choice X_t (sampling.py) depends on the committed prefix, the request's seed and
the position alone, so the first mismatch is itself the right token, and a full match yields one more. No loop
over requests, no special case for greedy, no rejection sampler. The definition, on any device;
`step/cpu_numba/verification.py` and `step/gpu_triton/verification.py` are the same. Called by
`actors/targets/runners/cpu_runner.py`.

Legend: X verdicts, R requests, K most drafts, W = K + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs.row_layout import by_request


def accept(chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens come out of a step.

    Args:
        chosen_X: the target's choices, request after request, in the order of rows.
        counts_R: how many of them each request has: 1 + its drafts, or 0 if nothing is sampled. int64.
        drafts_RK: proposals, -1 where there are fewer than K.

    Returns:
        token_ids [R, W], the new tokens of each request, then -1; and num_tokens [R]. Both int64.
    """
    chosen_RW = by_request(chosen_X, counts_R, drafts_RK.shape[1] + 1)
    # A draft of -1 stands against the one token more that its request has: there the run of matches ends.
    stood_RK = (chosen_RW[:, :-1] == drafts_RK).cumprod(dim=1)
    num_tokens_R = (stood_RK.sum(dim=1) + 1) * (counts_R > 0)
    columns_W = torch.arange(chosen_RW.shape[1], device=counts_R.device)
    return torch.where(columns_W < num_tokens_R.unsqueeze(1), chosen_RW, -1), num_tokens_R
