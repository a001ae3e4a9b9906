"""Log probabilities of sampled and prompt tokens, under the target's unmodified distribution.

Computed in fp32 from the logits before rules, temperature and filters. Works on any device without host
synchronization: a row's result is packed as int32, which `unpack_logprobs` decodes on the host. Called by
`actors/targets/runners/`.

    a row's values    log probability, rank, L likeliest ids, their L log probabilities    int32; fp32 bits

Legend: S slots, R requests, X sampled rows, N rows, V vocabulary, H hidden; A requests that want log
probabilities, Y their rows, L most top tokens, E = 2 + 2 L values of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.request.logprobs import RowLogprobs, StepLogprobs
from ....cluster.step.scheduler_output import SlotSampling
from ..inputs.row_layout import Ints

_CHUNK = 32  # rows whose fp32 logits are in memory at once


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows of a step that want log probabilities.

    Attributes:
        requests_A, begins_A, counts_A: indices in the plan; first row and number of rows of each.
        num_top: L.
    """

    requests_A: Ints
    begins_A: Ints
    counts_A: Ints
    num_top: int

    @classmethod
    def of(cls, num_top_R: Ints, begins_R: Ints, counts_R: Ints) -> LogprobRows | None:
        """Return the rows of requests by their top-k (-1: not wanted); None if there are none."""
        requests_A = np.flatnonzero((num_top_R >= 0) & (counts_R > 0))
        if not len(requests_A):
            return None
        maximum = int(num_top_R[requests_A].max())
        return cls(requests_A, begins_R[requests_A], counts_R[requests_A], maximum)

    def rows(self) -> Ints:
        """Return the row indices [Y], in the numbering of `begins_A`, request after request."""
        firsts_A = np.cumsum(self.counts_A) - self.counts_A
        return np.repeat(self.begins_A - firsts_A, self.counts_A) + np.arange(self.counts_A.sum())


class LogprobSlots:
    """Log probabilities that each request slot wants; kept on the host for all devices.

    Attributes:
        in_use: whether any slot wants some; the rest is not asked for otherwise.
    """

    def __init__(self, num_slots: int) -> None:
        self.in_use = False
        self._num_top_S = np.full(num_slots, -1, dtype=np.int64)  # -1: not wanted
        self._num_top_of_prompt_S = np.full(num_slots, -1, dtype=np.int64)
        self._prompt_length_S = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, sampling: SlotSampling) -> None:
        self._num_top_S[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        of_prompt = sampling.prompt_logprobs
        self._num_top_of_prompt_S[slot] = -1 if of_prompt is None else of_prompt
        self._prompt_length_S[slot] = sampling.prompt_length
        self.in_use = bool((self._num_top_S >= 0).any() or (self._num_top_of_prompt_S >= 0).any())

    def chosen(self, slots_R: Ints, begins_R: Ints, counts_R: Ints) -> LogprobRows | None:
        """Return the sampled rows that want log probabilities; all `counts` rows of a request do."""
        return LogprobRows.of(self._num_top_S[slots_R], begins_R, counts_R)

    def prompts(self, slots_R: Ints, first_R: Ints, num_rows_R: Ints) -> LogprobRows | None:
        """Return the prompt rows that want log probabilities: all that are followed by a prompt token.

        Args:
            first_R: absolute position of each request's first row.
        """
        before_last_R = self._prompt_length_S[slots_R] - 1 - first_R
        begins_R, counts_R = np.cumsum(num_rows_R) - num_rows_R, np.clip(before_last_R, 0, num_rows_R)
        return LogprobRows.of(self._num_top_of_prompt_S[slots_R], begins_R, counts_R)


def raw_logprobs(logits_XV: Tensor, logprob_rows: LogprobRows) -> Tensor:
    """Return log probabilities of all tokens in these rows: fp32 [Y, V], a copy."""
    return logits_XV[torch.from_numpy(logprob_rows.rows()).to(logits_XV.device)].float().log_softmax(dim=-1)


def pack_logprobs(logprobs_YV: Tensor, token_ids_Y: Tensor, num_top: int) -> Tensor:
    """Pack log probabilities and ranks of these tokens and of the likeliest ones: int32 [Y, E]."""
    own_Y1 = logprobs_YV.gather(1, token_ids_Y.unsqueeze(1))
    ranks_Y1 = (logprobs_YV >= own_Y1).sum(dim=1, keepdim=True)
    top = logprobs_YV.topk(min(num_top, logprobs_YV.shape[1]), dim=1)
    parts = (own_Y1.view(torch.int32), ranks_Y1.int(), top.indices.int(), top.values.view(torch.int32))
    return torch.cat(parts, dim=1)


def pack_logprobs_in_chunks(
    hidden_YH: Tensor, token_ids_Y: Tensor, head: Callable[[Tensor], Tensor], num_top: int
) -> Tensor:
    """Pack log probabilities from hidden states, int32 [Y, E], in chunks: a prompt's logits may not fit.

    Args:
        token_ids_Y: int64.
        head: hidden states to logits.
    """
    chunks = zip(hidden_YH.split(_CHUNK), token_ids_Y.split(_CHUNK), strict=True)
    packed = [pack_logprobs(head(h).float().log_softmax(dim=-1), ids, num_top) for h, ids in chunks]
    return torch.cat(packed)


def num_packed_values(num_top: int, vocab_size: int) -> int:
    """Return E, the number of values of a row."""
    return 2 + 2 * min(num_top, vocab_size)


def unpack_logprobs(packed_YE: NDArray[np.int32], logprob_rows: LogprobRows) -> StepLogprobs:
    """Decode the packed values of `pack_logprobs` on the host. A copy."""
    num_top = (packed_YE.shape[1] - 2) // 2

    def floats(values: NDArray[np.int32]) -> NDArray[np.float32]:
        return values.copy().view(np.float32)

    rows = RowLogprobs(
        logprobs_Y=floats(packed_YE[:, :1])[:, 0],
        ranks_Y=packed_YE[:, 1].copy(),
        top_ids_YL=packed_YE[:, 2 : 2 + num_top].copy(),
        top_logprobs_YL=floats(packed_YE[:, 2 + num_top :]),
    )
    return StepLogprobs(
        logprob_rows.requests_A.astype(np.int32), logprob_rows.counts_A.astype(np.int32), rows
    )
