"""How many rows each sequence of a step gets: arithmetic over arrays, called by `scheduler.py` alone.

Legend: R sequences asked for, by rank.
"""

from __future__ import annotations

import numpy as np

from .background_budget import Portion
from .plan import IntArray


def share(wanted_R: IntArray, budget: int) -> IntArray:
    """One row for everybody, then as many as each can use, in rank order."""
    more_R = wanted_R - 1
    taken_R = np.cumsum(more_R) - more_R
    return 1 + np.minimum(more_R, np.maximum(budget - len(wanted_R) - taken_R, 0))


def within(portion: Portion, wanted_R: IntArray, known_R: IntArray) -> IntArray:
    """What of the wanted rows is in the portion; none where it is used up."""
    decodes_R = known_R == 1
    prompt_R = np.where(decodes_R, 0, wanted_R)
    left_R = np.maximum(portion.prompt_rows - (np.cumsum(prompt_R) - prompt_R), 0)
    in_turn_R = np.cumsum(decodes_R) <= portion.num_decoding
    return np.where(decodes_R, np.where(in_turn_R, wanted_R, 0), np.minimum(prompt_R, left_R))
