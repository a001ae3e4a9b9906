"""Which of a step's drafts are verified, once they are made and their margins known.

    chance     of draft k, if those before it stand: sigmoid(bias_R + bias_K + slope_K log(1 + margin))
    survival   of draft k: the product of the chances up to it; it never rises along a request
    worth      of a draft: its survival times the weight of its request; of S drafts: the sum of the S largest
               worths and of the weights, for a token comes in any case
    seconds    of a step with so many rows

The S of the greatest worth - rate x seconds is taken, for the rate that steps bring in the long run (of the
greatest worth / seconds where that is not known), or what a chosen number of rows leaves room for. Survival
falls along a request, so what is taken of it is a beginning. No token depends on any of it: noise is equal on
both sides, so a cut may look at whatever it likes. Called by runners, the same values on all ranks; NumPy in
fp32, a sort of R x K numbers and a few passes over them. A GPU has a twin of it, for chosen numbers of rows.

Legend: R requests, K most drafts, S drafts that are verified, N rows of the target's pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..step.scheduler_output import BoolArray, IntArray, Trim

Floats = NDArray[np.float32]
MOST_MARGIN = np.float32(1e6)  # one token alone is possible: so sure at most, for 0 * inf is nothing


def trimmed(margins_RK: Floats, num_drafts_R: IntArray, num_other_rows: int, trim: Trim) -> IntArray:
    """How many drafts of each request to verify, int32 [R].

    Args:
        margins_RK: of the drafts; nan where there is none.
        num_drafts_R: that were made, and are verified at most.
        num_other_rows: of the pass in which drafts are verified, without them.
        trim: of the plan.
    """
    made_RK = np.arange(margins_RK.shape[1], dtype=np.int32) < num_drafts_R[:, None]
    # What was not made comes behind what is worth nothing.
    worths_RK = np.where(made_RK, trim.weights_R[:, None] * survivals(margins_RK, num_drafts_R, trim), -1)
    falling_S = np.sort(worths_RK, axis=None)[::-1]
    count = _best_count(falling_S, int(num_drafts_R.sum()), num_other_rows, trim)
    if count == 0:
        return np.zeros(len(num_drafts_R), dtype=np.int32)
    last = falling_S[count - 1]
    taken_RK = worths_RK > last
    missing = count - int(np.count_nonzero(taken_RK))
    taken_RK.reshape(-1)[np.flatnonzero(worths_RK == last)[:missing]] = True
    return np.count_nonzero(taken_RK, axis=1).astype(np.int32)


def survivals(margins_RK: Floats, num_drafts_R: IntArray, trim: Trim) -> Floats:
    """How likely each draft and those before it stand, fp32 [R, K]; 0 where there is no draft."""
    num_columns = margins_RK.shape[1]
    bias_RK = trim.bias_R[:, None] + trim.bias_K[:num_columns]
    with np.errstate(invalid="ignore", over="ignore"):  # nan: there is no draft; exp may reach inf
        sure_RK = np.log(1 + np.minimum(margins_RK, MOST_MARGIN))
        chances_RK = 1 / (1 + np.exp(-(bias_RK + trim.slope_K[:num_columns] * sure_RK)))
    position_K = np.arange(num_columns, dtype=np.int32)
    made_RK: BoolArray = (position_K < num_drafts_R[:, None]) & ~np.isnan(margins_RK)
    return np.cumprod(np.where(made_RK, chances_RK, np.float32(0)), axis=1, dtype=np.float32)


def _best_count(falling_S: Floats, num_drafts: int, num_other_rows: int, trim: Trim) -> int:
    """S."""
    if trim.num_rows is not None:
        return min(max(trim.num_rows - num_other_rows, 0), num_drafts)
    worth_S = np.cumsum(falling_S[:num_drafts], dtype=np.float32) + trim.weights_R.sum()
    worth_S = np.concatenate(([trim.weights_R.sum()], worth_S))
    seconds_S = trim.seconds_N[num_other_rows : num_other_rows + num_drafts + 1]
    if trim.rate > 0.0:
        return int(np.argmax(worth_S - np.float32(trim.rate) * seconds_S))
    return int(np.argmax(worth_S / seconds_S))
