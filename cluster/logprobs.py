"""Log probabilities that come back with tokens: of a step, as arrays; of a token, as a value.

Of the target's own distribution, before temperature, filters and rules. Made by `drafter/step/logprobs.py`,
carried by `StepResult`, cut and handed out by `outcome.py`.

Legend: A requests of a step that asked, W tokens of a request at most, L likeliest tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """Of one token that came out.

    Attributes:
        logprob, rank: its own, and its place among all tokens of the vocabulary, from 1.
        top_ids, top_logprobs: as many likeliest tokens in its place as were asked for, likeliest first.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of all rows that chose tokens for the requests that asked; those of rejected drafts say nothing.

    Attributes:
        requests_A: int32, their places in the plan.
        logprobs_AW, ranks_AW: fp32, int32; of the tokens.
        top_ids_AWL, top_logprobs_AWL: int32, fp32.
    """

    requests_A: NDArray[np.int32]
    logprobs_AW: NDArray[np.float32]
    ranks_AW: NDArray[np.int32]
    top_ids_AWL: NDArray[np.int32]
    top_logprobs_AWL: NDArray[np.float32]

    def of(self, request: int, num_tokens: int, num_top: int) -> tuple[TokenLogprobs, ...]:
        """Those of the first tokens of a request, by its place in the plan."""
        (place,) = np.flatnonzero(self.requests_A == request)
        return tuple(
            TokenLogprobs(logprob, rank, tuple(ids), tuple(logprobs))
            for logprob, rank, ids, logprobs in zip(
                self.logprobs_AW[place, :num_tokens].tolist(),
                self.ranks_AW[place, :num_tokens].tolist(),
                self.top_ids_AWL[place, :num_tokens, :num_top].tolist(),
                self.top_logprobs_AWL[place, :num_tokens, :num_top].tolist(),
                strict=True,
            )
        )
