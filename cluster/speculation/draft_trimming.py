"""Selects which of a step's drafts are verified, once they are made and their margins known.

`estimate_trimmed` estimates such steps from the drafts of recent blocks, for the policy's reviews.

    chance     of draft k, given those before it: sigmoid(bias_R + bias_K + slope_K log(1 + margin))
    survival   of draft k: the product of the chances up to it; never increases within a request
    worth      of a draft: its survival times its request's weight; of S drafts: the sum of the S largest
               worths and of all weights, because every request gets one token in any case
    seconds    of a step by its number of rows

Chooses the S with the largest worth - rate x seconds, where rate is the long-run worth per second
(Dinkelbach's method for the maximum of a ratio, 1967); the largest worth / seconds if that is not known; or
the S that fits into a given number of rows. Survival decreases within a request, so the drafts taken are a
prefix. No token depends on the selection, because noise is equal for drafting and verification. Called by
runners with the same values on all ranks. GPUs have an equivalent kernel for a given number of rows. Nodes of
a draft tree are trimmed alike (`prefixes_to_verify`): they are in the order of falling survival.

Legend: R requests, K most drafts, S drafts that are verified, N rows of the target's pass; in estimates N
blocks, M their drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..step.scheduler_output import BoolArray, FloatArray, IntArray, TreeGain, Trim
from .step_cost_model import Doubles

Floats = NDArray[np.float32]
MAX_MARGIN = np.float32(1e6)  # bound: if one token alone is possible it is inf, and 0 * inf is nan
BETTER = 1.02  # rate ratio to change a choice; estimates differ by a percent, and 1 is no better (0.998)
TRIM_S = 0.0001  # seconds that trimming takes on a core of a current server; a GPU trims in its step


class LengthEstimate(NamedTuple):
    """Expected figures of steps with one draft length; 0 while nothing is known."""

    rate: float = 0.0  # worth per second
    worth: float = 0.0  # tokens of a step, each times its request's weight
    seconds: float = 0.0
    num_verified: int = 0  # drafts worth verifying, over all requests
    trims: bool = False  # whether drafts are trimmed once their margins are known


def estimate_trimmed(
    worths_NK: FloatArray, num_requests: int, own_worth: float, seconds_S: Doubles, trim_s: float
) -> LengthEstimate:
    """Estimate a step with drafts like those of these blocks, if the best number of drafts is verified.

    Args:
        worths_NK: survival probability times weight, of each draft of each block.
        own_worth: worth of the tokens produced without any draft.
        seconds_S: seconds of the step with 0, 1, .., R x K drafts verified.
        trim_s: seconds that trimming takes itself.
    """
    falling_M = np.sort(worths_NK, axis=None)[::-1]
    worth_M = np.concatenate(([0.0], np.cumsum(falling_M, dtype=np.float64)))
    # The step verifies the same fraction of its drafts as is taken from the blocks.
    places_S = np.arange(len(seconds_S)) * len(worths_NK) // num_requests
    worth_S = own_worth + worth_M[places_S] * (num_requests / len(worths_NK))
    trimmed_s_S = seconds_S + trim_s
    rates_S = worth_S / trimmed_s_S
    count, rate = int(np.argmax(rates_S)), float(worth_S[-1] / seconds_S[-1])
    if rates_S[count] > BETTER * rate:
        figures = float(rates_S[count]), float(worth_S[count]), float(trimmed_s_S[count])
        return LengthEstimate(*figures, num_verified=count, trims=True)
    return LengthEstimate(rate, float(worth_S[-1]), float(seconds_S[-1]), len(seconds_S) - 1)


def drafts_to_verify(margins_RK: Floats, num_drafts_R: IntArray, num_other_rows: int, trim: Trim) -> IntArray:
    """Return how many drafts of each request to verify, int32 [R].

    Args:
        margins_RK: margins of the drafts; nan where there is none.
        num_drafts_R: number of drafts made, the maximum to verify.
        num_other_rows: rows of the verifying pass without the drafts.
        trim: the plan's parameters.
    """
    return prefixes_to_verify(survivals(margins_RK, num_drafts_R, trim), num_drafts_R, num_other_rows, trim)


def prefixes_to_verify(
    survivals_RK: Floats, num_drafts_R: IntArray, num_other_rows: int, trim: Trim
) -> IntArray:
    """Return how many drafts of each request to verify, by survival, which never increases; int32 [R]."""
    made_RK = np.arange(survivals_RK.shape[1], dtype=np.int32) < num_drafts_R[:, None]
    # Missing drafts sort after worthless ones.
    worths_RK = np.where(made_RK, trim.weights_R[:, None] * survivals_RK, -1)
    falling_S = np.sort(worths_RK, axis=None)[::-1]
    count = _best_count(falling_S, int(num_drafts_R.sum()), num_other_rows, trim)
    if count == 0:
        return np.zeros(len(num_drafts_R), dtype=np.int32)
    last = falling_S[count - 1]
    taken_RK = worths_RK > last
    missing = count - int(np.count_nonzero(taken_RK))
    taken_RK.reshape(-1)[np.flatnonzero(worths_RK == last)[:missing]] = True
    return np.count_nonzero(taken_RK, axis=1).astype(np.int32)


def tree_gain(
    survivals_RM: Floats, is_main_RM: BoolArray, num_other_rows: int, trim: Trim, grow_s: float
) -> TreeGain | None:
    """Return how much more worth trees have than their main paths alone, less the price of their rows.

    Both with the best number of rows, at the rate of the trim; None if it has none.

    Args:
        survivals_RM: of all nodes; 0 where there is none.
        is_main_RM: which of them are on the main path.
        grow_s: see `TreeGain`.
    """
    if trim.rate <= 0.0:
        return None
    worths_RM, seconds_S = trim.weights_R[:, None] * survivals_RM, trim.seconds_N[num_other_rows:]

    def best(worths_RM: Floats) -> tuple[float, int]:
        worth_S = np.cumsum(np.sort(worths_RM, axis=None)[::-1], dtype=np.float32)
        worth_S = np.concatenate((np.zeros(1, np.float32), worth_S))[: len(seconds_S)]
        value_S = worth_S - np.float32(trim.rate) * seconds_S[: len(worth_S)]
        return float(value_S.max()), int(value_S.argmax())

    value, num_nodes = best(worths_RM)
    return TreeGain(value - best(np.where(is_main_RM, worths_RM, np.float32(0)))[0], grow_s, num_nodes)


def survivals(margins_RK: Floats, num_drafts_R: IntArray, trim: Trim) -> Floats:
    """Return the survival probability of each draft, fp32 [R, K]; 0 where there is no draft."""
    num_columns = margins_RK.shape[1]
    bias_RK = trim.bias_R[:, None] + trim.bias_K[:num_columns]
    with np.errstate(invalid="ignore", over="ignore"):  # nan: there is no draft; exp may overflow to inf
        sure_RK = np.log(1 + np.minimum(margins_RK, MAX_MARGIN))
        chances_RK = 1 / (1 + np.exp(-(bias_RK + trim.slope_K[:num_columns] * sure_RK)))
    position_K = np.arange(num_columns, dtype=np.int32)
    made_RK: BoolArray = (position_K < num_drafts_R[:, None]) & ~np.isnan(margins_RK)
    return np.cumprod(np.where(made_RK, chances_RK, np.float32(0)), axis=1, dtype=np.float32)


def _best_count(falling_S: Floats, num_drafts: int, num_other_rows: int, trim: Trim) -> int:
    """Return the number of drafts to verify, S."""
    if trim.num_rows is not None:
        return min(max(trim.num_rows - num_other_rows, 0), num_drafts)
    worth_S = np.cumsum(falling_S[:num_drafts], dtype=np.float32) + trim.weights_R.sum()
    worth_S = np.concatenate(([trim.weights_R.sum()], worth_S))
    seconds_S = trim.seconds_N[num_other_rows : num_other_rows + num_drafts + 1]
    if trim.rate > 0.0:
        return int(np.argmax(worth_S - np.float32(trim.rate) * seconds_S))
    return int(np.argmax(worth_S / seconds_S))
