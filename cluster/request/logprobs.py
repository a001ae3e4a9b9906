"""Log probabilities returned with tokens: arrays over rows, and values per token.

They are of the target's own distribution, before temperature, filters and rules. Made by
`drafter/step/sampling/logprobs.py`, carried by `StepResult`, cut and distributed by
`cluster/step/step_outcome.py`.

Legend: A requests of a step that requested them, Y rows with log probabilities, L most likely tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """A token's log probability and rank (from 1), and the most likely tokens at its position."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of tokens at consecutive positions; fp32 and int32."""

    logprobs_Y: NDArray[np.float32]
    ranks_Y: NDArray[np.int32]
    top_ids_YL: NDArray[np.int32]
    top_logprobs_YL: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.logprobs_Y)

    def cut(self, begin: int, end: int, num_top: int) -> RowLogprobs:
        """Return some of the rows, with at most `num_top` likely tokens."""
        rows = slice(begin, end)
        top = (self.top_ids_YL[rows, :num_top], self.top_logprobs_YL[rows, :num_top])
        return RowLogprobs(self.logprobs_Y[rows], self.ranks_Y[rows], *top)

    def take(self, rows_Y: NDArray[np.int64]) -> RowLogprobs:
        """Return these rows."""
        top = (self.top_ids_YL[rows_Y], self.top_logprobs_YL[rows_Y])
        return RowLogprobs(self.logprobs_Y[rows_Y], self.ranks_Y[rows_Y], *top)

    @staticmethod
    def joined(runs: Sequence[RowLogprobs]) -> RowLogprobs:
        return RowLogprobs(
            np.concatenate([run.logprobs_Y for run in runs]),
            np.concatenate([run.ranks_Y for run in runs]),
            np.concatenate([run.top_ids_YL for run in runs]),
            np.concatenate([run.top_logprobs_YL for run in runs]),
        )

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        return tuple(
            TokenLogprobs(logprob, rank, tuple(ids), tuple(logprobs))
            for logprob, rank, ids, logprobs in zip(
                self.logprobs_Y.tolist(),
                self.ranks_Y.tolist(),
                self.top_ids_YL.tolist(),
                self.top_logprobs_YL.tolist(),
                strict=True,
            )
        )


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of a step's rows, request by request; rows of rejected drafts are meaningless.

    `requests_A` and `counts_A` (int32) are indices in the plan and numbers of rows of the requests.
    """

    requests_A: NDArray[np.int32]
    counts_A: NDArray[np.int32]
    rows: RowLogprobs

    def of(self, request: int, num_rows: int, num_top: int) -> RowLogprobs:
        """Return the first rows of a request, given its index in the plan."""
        (place,) = np.flatnonzero(self.requests_A == request)
        begin = int(self.counts_A[:place].sum())
        return self.rows.cut(begin, begin + num_rows, num_top)
