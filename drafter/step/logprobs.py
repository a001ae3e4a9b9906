"""Log probabilities of the tokens that a step chose, of the target's own distribution.

Taken from the logits before rules, temperature and filters have touched them, in fp32. Which requests asked
`states.py` knows; called by `actors/targets/runners/host.py`.

Legend: R requests, X rows that choose, V vocabulary; A requests that asked, Y their rows, W of one at most,
L likeliest tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...cluster.logprobs import StepLogprobs
from .rows import Ints


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Whose log probabilities a step is to tell.

    Attributes:
        requests_A, counts_A: places in the plan, and how many rows of each choose.
        rows_Y: among all rows that choose; request after request.
        num_top: L.
    """

    requests_A: Ints
    counts_A: Ints
    rows_Y: Ints
    num_top: int

    @classmethod
    def of(cls, num_top_R: Ints, counts_R: Ints) -> LogprobRows | None:
        """Of requests that asked for so many likeliest tokens (-1: did not ask); None if nobody did."""
        requests_A = np.flatnonzero((num_top_R >= 0) & (counts_R > 0))
        if not len(requests_A):
            return None
        asked_X = np.repeat((num_top_R >= 0), counts_R)
        return cls(requests_A, counts_R[requests_A], np.flatnonzero(asked_X), int(num_top_R.max()))


def raw_logprobs(logits_XV: Tensor, rows: LogprobRows) -> Tensor:
    """Of all tokens, in the rows of those that asked: fp32 [Y, V]. A copy."""
    return logits_XV[torch.from_numpy(rows.rows_Y).to(logits_XV.device)].float().log_softmax(dim=-1)


def tell_logprobs(logprobs_YV: Tensor, chosen_X: Tensor, rows: LogprobRows) -> StepLogprobs:
    """Those of the tokens that were chosen, and of the likeliest in their places, on the host."""
    chosen_Y1 = chosen_X[torch.from_numpy(rows.rows_Y).to(chosen_X.device)].unsqueeze(1)
    own_Y1 = logprobs_YV.gather(1, chosen_Y1)
    ranks_Y = (logprobs_YV >= own_Y1).sum(dim=1)
    top = logprobs_YV.topk(min(rows.num_top, logprobs_YV.shape[1]), dim=1)
    places = _places(rows.counts_A)

    def by_request(values_Y: Tensor, dtype: type[np.generic]) -> np.ndarray:
        shape = (len(rows.counts_A), int(rows.counts_A.max()), *values_Y.shape[1:])
        found = np.zeros(shape, dtype=dtype)
        found[places] = values_Y.cpu().numpy()
        return found

    return StepLogprobs(
        requests_A=rows.requests_A.astype(np.int32),
        logprobs_AW=by_request(own_Y1[:, 0], np.float32),
        ranks_AW=by_request(ranks_Y, np.int32),
        top_ids_AWL=by_request(top.indices, np.int32),
        top_logprobs_AWL=by_request(top.values, np.float32),
    )


def _places(counts_A: Ints) -> tuple[Ints, Ints]:
    """Of each row its request and its place there."""
    requests_Y = np.repeat(np.arange(len(counts_A)), counts_A)
    begins_Y = np.repeat(np.cumsum(counts_A) - counts_A, counts_A)
    return requests_Y, np.arange(counts_A.sum()) - begins_Y
