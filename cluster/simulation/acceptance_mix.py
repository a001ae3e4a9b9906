"""Models how hard the texts of simulated requests are to draft: each request is easy or hard throughout.

A mean acceptance curve hides that code drafts well and prose badly, and per-request policies profit from the
difference. Here each acceptance probability of request r is raised to the power h_r, its *hardness* (see
`simulated_drafts.py`), and the base curve B is chosen so that the mean over requests is the given curve S:

    h_r = g_r                    Gamma with mean 1 and standard deviation s (`spread`), shape a = 1 / s^2
    E[B^h] = (1 - ln B / a)^-a   the Gamma's Laplace transform, so B_k = exp(-a (S_k^(-1/a) - 1)) has mean S_k
    h_r = H_c g_r                for category c, with H_c such that it has the category's acceptance length

The mean is over requests with equal weight. Hard requests take more steps, so the mean over steps is lower.
Called by the simulations of `jobs/simulate/`. Drafter margins are simulated in `simulated_drafts.py`.

Legend: K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ConfigError

_MIN_SURVIVAL = 1e-12  # survival below this counts as 0
_NUM_BISECTIONS = 60
_MAX_HARDNESS = 1e3


class AcceptanceMix:
    """The distribution of hardness over requests, for one drafter.

    Args:
        survival: survival[i] is the probability that drafts 0..i of a request are all accepted, averaged over
            requests.
        spread: standard deviation of the hardness, at least 0; about 0.5 for a mix of code, maths and chat
            (acceptance lengths from 4.2 to 6.5 around 5.5, dflash on Qwen3).
        lengths: mean acceptance length of each category of requests, all equally frequent; None for a single
            category with the curve's own length.
        seed: seeds the hardness of requests.
    """

    def __init__(
        self,
        survival: Sequence[float],
        spread: float = 0.0,
        lengths: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= spread <= 3.0:
            raise ConfigError(f"spread={spread:g} must lie in [0, 3].", param="spread")
        self._spread, self._seed = spread, seed
        curve_K = np.clip(np.asarray(survival, dtype=np.float64), 0.0, 1.0)
        self._logs_K = -np.log(np.maximum(curve_K, _MIN_SURVIVAL))
        if spread > 0.0:
            self._logs_K = (np.maximum(curve_K, _MIN_SURVIVAL) ** -(spread**2) - 1.0) / spread**2
        self._hardness = {name: self._hardness_of(name, wanted) for name, wanted in (lengths or {}).items()}

    @property
    def survival(self) -> tuple[float, ...]:
        return tuple(np.exp(-self._logs_K).tolist())

    def category(self, request_id: str) -> str | None:
        names = list(self._hardness)
        return names[int(self._rng(request_id).integers(len(names)))] if names else None

    def hardness(self, request_id: str) -> float:
        category = self.category(request_id)
        mean = 1.0 if category is None else self._hardness[category]
        if self._spread == 0.0:
            return mean
        rng = self._rng(request_id)
        rng.integers(2)  # skip the draw of the category
        return mean * float(rng.gamma(self._spread**-2, self._spread**2))

    def _rng(self, request_id: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *request_id.encode()])

    def _length(self, hardness: float) -> float:
        """Return the mean acceptance length of requests with this mean hardness."""
        logs_K = hardness * self._logs_K
        if self._spread == 0.0:
            return 1.0 + float(np.exp(-logs_K).sum())
        return 1.0 + float(((1.0 + self._spread**2 * logs_K) ** -(self._spread**-2)).sum())

    def _hardness_of(self, name: str, wanted: float) -> float:
        """Return the hardness at which a category has the mean acceptance length `wanted`, by bisection."""
        low, high = 0.0, _MAX_HARDNESS
        if not self._length(high) <= wanted <= self._length(low):
            raise ConfigError(
                f"acceptance of {name}={wanted:g} must be a mean acceptance length from 1 to "
                f"{self._length(low):g}.",
                param="acceptance",
            )
        for _ in range(_NUM_BISECTIONS):
            mid = (low + high) / 2.0
            low, high = (mid, high) if self._length(mid) > wanted else (low, mid)
        return high
