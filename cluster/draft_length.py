"""How many drafts a request gets in the next step: as many as bring the most tokens per second.

A step with k drafts per request brings 1 + S_1 + .. + S_k tokens on average, S_i being the chance that i
drafts in a row are accepted, and takes as long as it takes. Where rows are free (one request on a GPU) all
drafts are worth it; where every row costs (many requests, a CPU) only the likely ones are; where even those
are not, none is. Both sides are measured while the engine runs, nothing is assumed of the hardware.

Measured are a few lengths, the *ladder*; times by number of requests, for rows are cheap or dear by how many
there are. Now and then a step tries a neighbour of the best length, or none: times and acceptance change with
contexts and texts. Outputs do not depend on it, only speed. Used by `pace.py` alone.

Legend: R requests of a step, K most drafts.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

import numpy as np

from .plan import IntArray

_TIMES = 5  # the last ones count, by their median: a hiccup of the machine is no measure
_TRY_UNKNOWN, _TRY_KNOWN = 2, 64  # steps from one try to the next
_DECAY = 0.995  # of acceptance, per step
_PRIOR_TRIALS, _PRIOR_ACCEPTED = 4.0, 3.0  # a new drafter is given credit


def draft_ladder(most: int) -> tuple[int, ...]:
    """Numbers of drafts that are told apart: 0, 1, 3, 5, 7, 11, 15, 23, .. and the most.

    With its known token a request then has 1, 2, 4, 6, 8, 12, 16, 24, .. rows; a GPU has graphs for these.
    """
    rows = {1, *(base << n for base in (2, 6) for n in range(most.bit_length()))}
    return tuple(sorted({*(count - 1 for count in rows if count <= most), most}))


class DraftLength:
    """The choice for one engine.

    Args:
        most: drafts per request at most (K).
    """

    def __init__(self, most: int) -> None:
        self._ladder = draft_ladder(most)
        self._trials_K = np.full(most, _PRIOR_TRIALS)
        self._accepted_K = np.full(most, _PRIOR_ACCEPTED)
        self._times: dict[int, list[deque[float]]] = defaultdict(
            lambda: [deque(maxlen=_TIMES) for _ in self._ladder]
        )
        self._best: dict[int, int] = {}  # rung, by load
        self._num_steps: dict[int, int] = defaultdict(int)

    def choose(self, num_requests: int) -> int:
        """Drafts per request of a step with so many requests."""
        load = load_of(num_requests)
        if load not in self._best:
            self._best[load] = self._nearest(load)
        best = self._best[load]
        self._num_steps[load] += 1
        return self._ladder[self._neighbour_to_try(load, best)]

    @property
    def is_new(self) -> bool:
        """Whether no step has been measured yet."""
        return not self._best

    def tokens(self, num_drafts: int) -> float:
        """What a request's step with so many drafts brings on average."""
        return self._expected_tokens()[num_drafts]

    def learn_acceptance(self, drafts_R: IntArray, accepted_R: IntArray) -> None:
        """What became of a step's drafts."""
        position_K = np.arange(len(self._trials_K))
        reached_K = ((position_K < drafts_R[:, None]) & (position_K <= accepted_R[:, None])).sum(axis=0)
        accepted_K = (position_K < accepted_R[:, None]).sum(axis=0)
        kept_K = np.where(reached_K > 0, _DECAY, 1.0)  # what is not tried does not fade
        self._trials_K = kept_K * self._trials_K + reached_K
        self._accepted_K = kept_K * self._accepted_K + accepted_K

    def learn_time(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """How long a step took in which so many requests decoded with so many drafts each, and no more."""
        if num_drafts not in self._ladder or seconds <= 0:
            return
        load = load_of(num_requests)
        self._times[load][self._ladder.index(num_drafts)].append(seconds)
        self._best[load] = self._fastest(load)

    def _fastest(self, load: int) -> int:
        """The rung with most tokens per second among those that are known; there is one."""
        times = self._times[load]
        known = [i for i, seconds in enumerate(times) if seconds]
        tokens = self._expected_tokens()
        return max(known, key=lambda i: tokens[self._ladder[i]] / median(times[i]))

    def _expected_tokens(self) -> list[float]:
        """Of a step of one request with 0, 1, .., K drafts."""
        survival_K = np.cumprod(self._accepted_K / self._trials_K)
        return np.concatenate(([1.0], 1.0 + np.cumsum(survival_K))).tolist()

    def _neighbour_to_try(self, load: int, best: int) -> int:
        """The best rung, or in some steps one beside it or the lowest: soon if unknown, seldom if known."""
        step, times = self._num_steps[load], self._times[load]
        # No drafts at all save the drafter's pass, too: that may pay where one draft less does not.
        beside = [i for i in sorted({0, best - 1, best + 1} - {best}) if 0 <= i < len(self._ladder)]
        if not times[best]:
            return best
        unknown = [i for i in beside if not times[i]]
        if unknown and step % _TRY_UNKNOWN == 0:
            return unknown[-1]
        if beside and step % _TRY_KNOWN == 0:
            return beside[step // _TRY_KNOWN % len(beside)]
        return best

    def _nearest(self, load: int) -> int:
        """What is best at the most similar load, to begin with; all drafts if nothing is known."""
        if not self._best:
            return len(self._ladder) - 1
        return self._best[min(self._best, key=lambda other: abs(other - load))]


def load_of(num_requests: int) -> int:
    """Numbers of requests that are measured as one: each up to 8, then those within a fifth."""
    return round(4 * math.log2(max(num_requests, 1)))
