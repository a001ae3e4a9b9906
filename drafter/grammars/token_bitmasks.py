"""Token bitmasks of a step's rows, without llguidance. Legend: M rows with grammars, W words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which tokens grammars allow in each row.

    `rows_M` are ascending indices among the step's sampled rows, `bits_MW` a bit per token, lowest first,
    overwritten by the next step. `end_id` ends the text where all rules together allow nothing.
    """

    rows_M: Ints
    bits_MW: Words
    end_id: int
