"""Simulated drafts: margins, and which drafts the target accepts.

Draft k is accepted, if those before it are, with a probability p that differs from draft to draft: u to the
power of (1 - c) / c, with u uniform in (0, 1); its mean is c, the curve's value at position k. The margin is
p on the scale on which policies read it: log(1 + margin) = log(p / (1 - p)) + 4, clipped to 0 and 12. So a
policy that trims by margins gains as much as possible, and one that ignores them sees the curve. Everything
is a pure function of (seed, position). Used by `simulated_executor.py` only.

Legend: R requests, K most drafts of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..step.scheduler_output import BoolArray, FloatArray, IntArray

Hashes = NDArray[np.uint64]
_PROBABILITY, _ACCEPTANCE = 1, 2  # streams of noise; stream 0 makes tokens
_NUM_STREAMS = 4
_MIN_LOGIT, _MAX_LOG_MARGIN = -4.0, 12.0


class SimulatedDrafts:
    """Simulates one drafter; survival[i] is the probability that drafts 0..i are all accepted."""

    def __init__(self, survival: Sequence[float]) -> None:
        curve = np.asarray(survival, dtype=np.float64)
        if (curve < 0).any() or (curve > 1).any() or (np.diff(curve) > 0).any():
            raise ConfigError(
                f"survival={list(survival)} must be probabilities that never rise.", param="survival"
            )
        before = np.concatenate(([1.0], curve))[: len(curve)]
        self._chances_K = np.divide(curve, before, out=np.zeros_like(curve), where=before > 0)

    def propose(
        self, seeds_R: Hashes, begin_R: IntArray, num_drafts_R: IntArray, hardness_R: NDArray[np.float64]
    ) -> tuple[FloatArray, BoolArray]:
        """Return margins, and whether each draft is accepted, both [R, K]; the first draft is at `begin_R`.

        Acceptance probabilities are raised to the power `hardness_R`, the hardness of a request's text.
        """
        made_RK = np.arange(int(num_drafts_R.max(initial=0)), dtype=np.int32) < num_drafts_R[:, None]
        log_chance_RK, uniform_RK = self.chances(seeds_R, begin_R, num_drafts_R, hardness_R)
        accepted_RK = np.log(uniform_RK) < log_chance_RK
        logits_RK = log_chance_RK - np.log(-np.expm1(np.minimum(log_chance_RK, -1e-12)))
        log_margins_RK = np.clip(logits_RK - _MIN_LOGIT, 0.0, _MAX_LOG_MARGIN)
        margins_RK = np.where(made_RK, np.expm1(log_margins_RK), np.nan)
        return margins_RK.astype(np.float32), np.logical_and.accumulate(accepted_RK & made_RK, axis=1)

    def chances(
        self, seeds_R: Hashes, begin_R: IntArray, num_drafts_R: IntArray, hardness_R: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the logs of acceptance probabilities, and the noise to compare them with, [R, K]."""
        position_K = np.arange(int(num_drafts_R.max(initial=0)), dtype=np.int32)
        chances_K = np.zeros(len(position_K))
        count = min(len(position_K), len(self._chances_K))
        chances_K[:count] = self._chances_K[:count]
        means_RK = np.clip(chances_K ** hardness_R[:, None], 1e-12, 1 - 1e-12)
        keys_RK = seeds_R[:, None], begin_R[:, None] + position_K
        log_chance_RK = (1 - means_RK) / means_RK * np.log(_uniform(noise(*keys_RK, _PROBABILITY)))
        return log_chance_RK, _uniform(noise(*keys_RK, _ACCEPTANCE))


def noise(seeds: Hashes, positions: IntArray, stream: int) -> Hashes:
    """Return 64 random bits of (seed, position) by SplitMix64's finalizer; integer overflow is intended."""
    with np.errstate(over="ignore"):
        counter = positions.astype(np.uint64) * np.uint64(_NUM_STREAMS) + np.uint64(stream)
        return _mix(_mix(seeds) + counter * np.uint64(0x9E3779B97F4A7C15))


def _mix(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(hashes: Hashes) -> NDArray[np.float64]:
    return (hashes >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53
