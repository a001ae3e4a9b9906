"""Distributes a step's rows over sequences. Called by `scheduler.py` only.

Legend: R sequences, by rank.
"""

from __future__ import annotations

import numpy as np

from ..step.scheduler_output import IntArray
from .background_budget import BackgroundWork


def share(wanted_R: IntArray, budget: int) -> IntArray:
    """Return one row for each sequence, plus the rest of the budget in rank order, as wanted."""
    extra_R = wanted_R - 1
    used_R = np.cumsum(extra_R) - extra_R
    return 1 + np.minimum(extra_R, np.maximum(budget - len(wanted_R) - used_R, 0))


def within(portion: BackgroundWork, wanted_R: IntArray, known_R: IntArray) -> IntArray:
    """Return the wanted rows that fit the portion, in rank order; 0 for sequences once it is used up."""
    decodes_R = known_R == 1
    prompt_R = np.where(decodes_R, 0, wanted_R)
    remaining_R = np.maximum(portion.prompt_rows - (np.cumsum(prompt_R) - prompt_R), 0)
    fits_R = np.cumsum(decodes_R) <= portion.num_decoding
    return np.where(decodes_R, np.where(fits_R, wanted_R, 0), np.minimum(prompt_R, remaining_R))
