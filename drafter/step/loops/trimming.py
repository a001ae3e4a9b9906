"""The cut of `../trimming.py` in one call: of few drafts NumPy's thirty operators take ten times as long.

Nothing is sorted: survival falls along a request, so the worthiest draft that is left is the next one of
some request, and a heap of requests has it on top. It ends as soon as that one is worth less than what it and
any number behind it take at least; of drafts that are not reached no chance is computed.

Called by `actors/targets/runners/host.py`. Legend: R requests, K most drafts, N rows, S taken.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....cluster.plan import IntArray, SchedulerOutput
from ....cluster.speculation.draft_trimming import MOST_MARGIN
from ...compute.loops.elements import elements

_ONE, _ZERO = np.float32(1), np.float32(0)


def trim(margins_RK: Tensor, plan: SchedulerOutput) -> IntArray:
    """As of `../trimming.py`; worths are those to a few units in the last place."""
    trim = plan.trim
    assert trim is not None, "asked where drafts are cut"
    num_rows = -1 if trim.num_rows is None else trim.num_rows
    return _trim(
        margins_RK.numpy(),
        plan.num_drafts,
        plan.num_rows,
        trim.bias_R,
        trim.bias_K,
        trim.slope_K,
        trim.weights_R,
        trim.seconds_N,
        num_rows,
        np.float32(trim.rate),
    )


def take_out(drafts_RK: Tensor, num_drafts_R: Tensor) -> Tensor:
    """As of `../trimming.py`."""
    drafts = drafts_RK.numpy().copy()
    _take_out(drafts, num_drafts_R.numpy())
    return torch.from_numpy(drafts)


@elements
def _take_out(drafts_RK, num_drafts_R):
    for r in range(drafts_RK.shape[0]):
        drafts_RK[r, num_drafts_R[r] :] = -1


@elements
def _trim(
    margins_RK, num_drafts_R, num_rows_R, bias_R, bias_K, slope_K, weights_R, seconds_N, num_rows, rate
):  # fmt: skip
    num_requests = len(num_drafts_R)
    most, num_other_rows = 0, 0
    own = _ZERO
    for r in range(num_requests):
        most += num_drafts_R[r]
        num_other_rows += num_rows_R[r] - num_drafts_R[r]
        own += weights_R[r]
    least_N = _least_slopes(seconds_N, num_other_rows, most) if num_rows < 0 and rate > _ZERO else seconds_N
    heap = np.empty(num_requests, dtype=np.int32)  # requests, that of the worthiest next draft on top
    worths_R = np.zeros(num_requests, dtype=np.float32)  # of the next draft of each
    survivals_R = np.ones(num_requests, dtype=np.float32)
    reached_R = np.zeros(num_requests, dtype=np.int32)  # drafts of each that were looked at
    owners_S = np.empty(most, dtype=np.int32)  # of drafts, the worthiest first
    size = 0
    for r in range(num_requests):
        if num_drafts_R[r]:
            survivals_R[r] = _chance(margins_RK[r, 0], bias_R[r] + bias_K[0], slope_K[0])
            worths_R[r] = weights_R[r] * survivals_R[r]
            heap[size] = r
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sift(heap, worths_R, place, size)
    limit = min(max(num_rows - num_other_rows, 0), most) if num_rows >= 0 else most
    worth, best, count = own, np.float32(-np.inf), limit
    if num_rows < 0:
        seconds = seconds_N[num_other_rows]
        best, count = worth - rate * seconds if rate > _ZERO else worth / seconds, 0
    for s in range(limit):
        r = heap[0]
        if num_rows < 0 and rate > _ZERO and worths_R[r] <= rate * least_N[s]:
            break  # nothing behind it is worth its rows
        worth += worths_R[r]
        owners_S[s] = r
        reached_R[r] += 1
        k = reached_R[r]
        if k < num_drafts_R[r]:
            survivals_R[r] *= _chance(margins_RK[r, k], bias_R[r] + bias_K[k], slope_K[k])
            worths_R[r] = weights_R[r] * survivals_R[r]
        else:
            size -= 1
            heap[0] = heap[size]
        _sift(heap, worths_R, 0, size)
        if num_rows >= 0:
            continue
        seconds = seconds_N[num_other_rows + s + 1]
        rated = worth - rate * seconds if rate > _ZERO else worth / seconds
        if rated > best:
            best, count = rated, s + 1
    taken_R = np.zeros(num_requests, dtype=np.int32)
    for s in range(count):
        taken_R[owners_S[s]] += 1
    return taken_R


@elements
def _chance(margin, bias, slope):
    """Of a draft, if those before it stand."""
    if np.isnan(margin):
        return _ZERO
    return _ONE / (_ONE + np.exp(-(bias + slope * np.log(_ONE + min(margin, MOST_MARGIN)))))


@elements
def _sift(heap, worths_R, place, size):
    """Down to its place: the worthiest first, of equal ones the first request."""
    while True:
        child = 2 * place + 1
        if child >= size:
            return
        if child + 1 < size and _comes_first(heap[child + 1], heap[child], worths_R):
            child += 1
        if not _comes_first(heap[child], heap[place], worths_R):
            return
        heap[child], heap[place] = heap[place], heap[child]
        place = child


@elements
def _comes_first(one, other, worths_R):
    return worths_R[one] > worths_R[other] or (worths_R[one] == worths_R[other] and one < other)


@elements
def _least_slopes(seconds_N, num_other_rows, most):
    """Seconds that a draft more takes at least, with 0, 1, .. `most` - 1 of them, however many follow: the
    slopes of the greatest convex curve below."""
    hull = np.empty(most + 1, dtype=np.int32)  # its corners, the nearest last
    slopes = np.empty(most, dtype=np.float32)
    hull[0], size = most, 1
    for s in range(most - 1, -1, -1):
        here = seconds_N[num_other_rows + s]
        slope = (seconds_N[num_other_rows + hull[size - 1]] - here) / np.float32(hull[size - 1] - s)
        while size > 1:
            further = (seconds_N[num_other_rows + hull[size - 2]] - here) / np.float32(hull[size - 2] - s)
            if further > slope:
                break
            slope = further
            size -= 1
        hull[size] = s
        size += 1
        slopes[s] = slope
    return slopes
