"""Log probabilities that come back with tokens: of rows, as arrays; of a token, as a value.

Of the target's own distribution, before temperature, filters and rules. Made by `drafter/step/logprobs.py`,
carried by `StepResult`, cut and handed out by `outcome.py`.

Legend: A requests of a step that asked, Y rows that tell, L likeliest tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """Of one token in its place.

    Attributes:
        logprob, rank: its own, and its place among all tokens of the vocabulary, from 1.
        top_ids, top_logprobs: as many likeliest tokens in its place as were asked for, likeliest first.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of the tokens in consecutive places; fp32 and int32."""

    logprobs_Y: NDArray[np.float32]
    ranks_Y: NDArray[np.int32]
    top_ids_YL: NDArray[np.int32]
    top_logprobs_YL: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.logprobs_Y)

    def cut(self, begin: int, end: int, num_top: int) -> RowLogprobs:
        """Some of the rows, with so many likeliest tokens at most."""
        rows = slice(begin, end)
        top = (self.top_ids_YL[rows, :num_top], self.top_logprobs_YL[rows, :num_top])
        return RowLogprobs(self.logprobs_Y[rows], self.ranks_Y[rows], *top)

    @staticmethod
    def joined(runs: Sequence[RowLogprobs]) -> RowLogprobs:
        """One behind the other, all with as many likeliest tokens."""
        return RowLogprobs(
            np.concatenate([run.logprobs_Y for run in runs]),
            np.concatenate([run.ranks_Y for run in runs]),
            np.concatenate([run.top_ids_YL for run in runs]),
            np.concatenate([run.top_logprobs_YL for run in runs]),
        )

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """Each as a value."""
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
    """Of a step's rows for the requests that asked, request after request; the rows of rejected drafts say
    nothing.

    Attributes:
        requests_A, counts_A: int32, their places in the plan, and how many rows each has.
    """

    requests_A: NDArray[np.int32]
    counts_A: NDArray[np.int32]
    rows: RowLogprobs

    def of(self, request: int, num_rows: int, num_top: int) -> RowLogprobs:
        """The first rows of a request that asked, by its place in the plan."""
        (place,) = np.flatnonzero(self.requests_A == request)
        begin = int(self.counts_A[:place].sum())
        return self.rows.cut(begin, begin + num_rows, num_top)
