"""Estimates the worth and the seconds of a step by the drafts of recent blocks. Used by the policy's reviews.

Legend: R decoding requests, K most drafts of a request, N blocks, M their drafts, S drafts that are verified.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..step.scheduler_output import FloatArray
from .step_cost_model import Doubles

BETTER = 1.02  # rate ratio to change a choice; estimates differ by about a percent


class LengthEstimate(NamedTuple):
    """Expected figures of steps with one draft length; 0 while nothing is known."""

    rate: float = 0.0  # worth per second
    worth: float = 0.0  # tokens of a step, each times its request's weight
    seconds: float = 0.0
    num_verified: int = 0  # drafts worth verifying, over all requests
    trims: bool = False  # whether drafts are trimmed once their margins are known


def estimate_trimmed(
    worths_NK: FloatArray, num_requests: int, own_worth: float, seconds_S: Doubles
) -> LengthEstimate:
    """Estimate a step with drafts like those of these blocks, if the best number of drafts is verified.

    Args:
        worths_NK: survival probability times weight, of each draft of each block.
        own_worth: worth of the tokens produced without any draft.
        seconds_S: seconds of the step with 0, 1, .., R x K drafts verified.
    """
    falling_M = np.sort(worths_NK, axis=None)[::-1]
    worth_M = np.concatenate(([0.0], np.cumsum(falling_M, dtype=np.float64)))
    # The step verifies the same fraction of its drafts as is taken from the blocks.
    places_S = np.arange(len(seconds_S)) * len(worths_NK) // num_requests
    worth_S = own_worth + worth_M[places_S] * (num_requests / len(worths_NK))
    rates_S = worth_S / seconds_S
    count = int(np.argmax(rates_S))
    trims = bool(rates_S[count] > BETTER * rates_S[-1])  # trimming takes time itself
    if not trims:
        count = len(seconds_S) - 1
    return LengthEstimate(float(rates_S[count]), float(worth_S[count]), float(seconds_S[count]), count, trims)
