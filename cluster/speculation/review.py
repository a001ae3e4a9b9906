"""What each length of blocks would bring just now, and what of that is not known well enough.

A review is made anew each time that `policy.py` looks for the best length, and then forgotten: it plays the
last margins of those that run (`survival.py`) through `outlook.py`, with the seconds that steps take by
`costs.py`. Of many requests some stand for all.

Legend: R requests, K most drafts of each, N samples of requests, S drafts that are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..plan import BoolArray, FloatArray, IntArray
from .costs import Costs, Load
from .outlook import Outlook, outlook, plain
from .survival import NUM_SAMPLES, Survival

_SAMPLED = 64  # requests of all samples together
_BETTER = 1.01
_KNOWN = 2.5  # seconds are known whose bounds are nearer than this


class Decoding(NamedTuple):
    """Those that decode.

    Attributes:
        slots_R: who.
        limits_R: most drafts of each.
        weights_R: what a token of each is worth.
    """

    slots_R: IntArray
    limits_R: IntArray
    weights_R: FloatArray


class Review:
    """For these requests, in a step of such a load.

    Args:
        lengths: that are possible, ascending, 0 first.

    Attributes:
        outlooks: of each length.
    """

    def __init__(
        self, who: Decoding, load: Load, survival: Survival, costs: Costs, lengths: Sequence[int]
    ) -> None:
        self._who, self._load, self._costs, self._survival = who, load, costs, survival
        self._own = float(who.weights_R.sum())
        self._rest_S = costs.rest_s(load, len(who.slots_R) * lengths[-1])
        least_L, most_L = costs.bounds_s(load, lengths)
        self._least_s = dict(zip(lengths, least_L.tolist(), strict=True))
        self._most_s = dict(zip(lengths, most_L.tolist(), strict=True))
        self._owners_N, self._worths_NK = self._play(lengths[-1])
        every_N = np.ones(len(self._owners_N), dtype=np.bool_)
        self.outlooks = {0: plain(self._own, float(self._rest_S[0]))}
        for length in lengths[1:]:
            self.outlooks[length] = self._outlook(length, len(who.slots_R), every_N)

    @property
    def plain_s(self) -> float:
        """Of a step without drafts."""
        return self.outlooks[0].seconds

    def _play(self, most: int) -> tuple[IntArray, FloatArray]:
        """Places of requests [N], and the worths of their drafts in some late step [N, K]."""
        who, num_requests = self._who, len(self._who.slots_R)
        num_some = min(num_requests, _SAMPLED)
        some = (np.arange(num_some) * num_requests // num_some).astype(np.int32)
        count = min(max(_SAMPLED // num_requests, 1), NUM_SAMPLES)
        samples_TRK = self._survival.samples(who.slots_R[some], count)[:, :, :most]
        possible_RK = np.arange(most) < who.limits_R[some][:, None]
        worths_TRK = samples_TRK * (who.weights_R[some][:, None] * possible_RK)
        return np.tile(some, count), worths_TRK.reshape(-1, most)

    def _outlook(self, length: int, num_drafting: int, some_N: BoolArray) -> Outlook:
        """If so many requests draft, those of these samples."""
        draft_s = self._costs.draft_s(self._load.context, num_drafting * (length + 1), num_drafting)
        seconds_S = self._rest_S[: num_drafting * length + 1] + draft_s
        worths_NK = self._worths_NK[some_N, :length]
        return outlook(worths_NK, num_drafting, self._own, seconds_S, self._costs.cutting)

    def decliners(self, length: int) -> IntArray:
        """Slots of those whose drafts are not worth the drafter's rows: of the half or the quarter that is
        least likely to gain, or of none."""
        slots_R, count = self._who.slots_R, len(self._who.slots_R)
        found, best = 0, self.outlooks[length].rate
        if count < 2:
            return slots_R[:0]
        gains_R = self._survival.means(slots_R)[:, :length].sum(axis=1) * self._who.weights_R
        order_R = np.argsort(gains_R, kind="stable")
        for part in {count // 4, count // 2} - {0}:
            left_N = ~np.isin(self._owners_N, order_R[:part])
            rate = self._outlook(length, count - part, left_N).rate if left_N.any() else 0.0
            if rate > _BETTER * best:
                found, best = part, rate
        return slots_R[order_R[:found]]

    def most_gain(self, length: int) -> float:
        """Worth per second of a step in which all such drafts are verified, if it takes the least it may."""
        count = len(self._who.slots_R)
        worth = self._own + float(self._worths_NK[:, :length].sum()) * count / len(self._owners_N)
        return worth / self._least_s[length]

    def is_known(self, length: int) -> bool:
        """Whether it is known what such a step takes, about."""
        return self._most_s[length] <= _KNOWN * self._least_s[length]

    def most_loss_s(self, length: int, rate: float) -> float:
        """How much longer such a step may take than a way that brings so much, if no draft stands."""
        return self._most_s[length] - self._own / rate
