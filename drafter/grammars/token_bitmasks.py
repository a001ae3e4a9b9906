"""What grammars say of a step's rows, as whoever chooses tokens reads it. Needs no llguidance.

Legend: M rows of requests with grammars, W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which tokens rows may choose, as far as grammars say.

    Attributes:
        rows_M: among all rows of the step that choose tokens, ascending.
        bits_MW: a bit per token, lowest first. Overwritten by the next step's.
        end_id: chosen where, with all other rules, nothing is possible: it ends the text.
    """

    rows_M: Ints
    bits_MW: Words
    end_id: int
