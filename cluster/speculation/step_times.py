"""What a pass takes, learned from every step that was: a straight line in each thing that a step has.

    seconds = a + b R + sum over segments i of s_i |rows in i| + c C + d C N / R + e [P > 0] + f P

with N rows of R requests that decode, C tokens that these look back on, and P rows of prompts. Segments end
at powers of two, so that rows may be free up to some number, dear beyond, or the cheaper the more there are
(experts); b is why four requests of one row are not one request of four. No coefficient is below zero.

They are learned by a Kalman filter: what a step tells goes to what was least known. What one load teaches
holds for others as far as they share coefficients, and how well a step is known that was never made comes
with it (`Foreseen.doubt`), which is what trials are for. What is not measured for long becomes less known.

The machine's own phases are not learned here (`costs.py`): a step's seconds come by what it takes in them.

Pure; used by `costs.py` alone. Legend: F coefficients, K knots, N points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_KNOTS = np.concatenate(([1.0], 2.0 ** np.arange(1, 14)))  # rows where segments begin
_ALWAYS, _REQUESTS, _CONTEXT, _ATTENTION, _PROMPT, _PROMPT_ROWS = range(6)
_FIRST_SEGMENT = 6
_NUM = _FIRST_SEGMENT + len(_KNOTS)
_USUAL_CONTEXT = 1024.0  # tokens, or those of the first pass

# What is thought before anything was measured, by the first step's seconds: about, and how far off it may be.
_REQUEST, _ROW = (0.03, 0.10), (0.05, 0.10)
_TURN = 0.5  # how much a segment's rows may differ from those of the one before, by what a row may be off
_LOOKING_BACK, _LOOKED_AT = 0.3, 0.02  # of a usual context, read once, or by every row
_PROMPTS, _PROMPTS_ROW = 1.0, 0.1
_FORGET = 5e-5  # of what was unknown at first, again with each step
_FIRST_NOISE = 0.3  # of the first pass
_KEPT = 0.1  # of what was unknown at first, of what was kept
_MOST_RENEWED, _TINY = 0.005, 1e-30
_MOST_DOUBT = 20.0
_LEAST = 1e-3  # of the first step's seconds: no pass takes less


class Work(NamedTuple):
    """What a pass does.

    Attributes:
        rows, requests: of requests that decode.
        prompt_rows: all others.
        context: tokens that its requests look back on, together.
    """

    rows: float
    requests: float
    prompt_rows: float
    context: float


class Foreseen(NamedTuple):
    """Of a pass.

    Attributes:
        seconds: about.
        doubt: part of these, by which they may be off: one standard deviation.
        features_F, unknown_F: what it has of each coefficient, and how that is known together with it.
    """

    seconds: float
    doubt: float
    features_F: Doubles
    unknown_F: Doubles


class StepTimes:
    """Of one kind of pass, of one engine."""

    def __init__(self) -> None:
        self._theta_F: Doubles = np.zeros(_NUM)
        self._unknown_FF: Doubles = np.zeros((_NUM, _NUM))
        self._renewed_FF: Doubles = np.zeros((_NUM, _NUM))  # with each step
        self._first_s = 0.0  # seconds that it all began with
        self._knows_prompts_only = True

    def __bool__(self) -> bool:
        return bool(self._first_s > 0.0)

    def foresee(self, work: Work) -> Foreseen:
        """What such a pass takes, about; something is known."""
        features_F = _features(work)
        unknown_F = self._unknown_FF @ features_F
        seconds = self._at_least(float(features_F @ self._theta_F))
        variance = max(float(features_F @ unknown_F), 0.0)
        return Foreseen(seconds, math.sqrt(variance) / seconds, features_F, unknown_F)

    def seconds_of_rows(self, rows_N: Doubles, work: Work) -> Doubles:
        """Of passes with so many rows in place of `work`'s, about."""
        theta_F = self._theta_F
        own = _features(work._replace(rows=0.0))
        requests = max(work.requests, 1.0)
        seconds_N = own @ theta_F + theta_F[_ATTENTION] * (work.context / requests) * rows_N
        knots_K = np.concatenate(([0.0], np.cumsum(theta_F[_FIRST_SEGMENT:-1] * np.diff(_KNOTS))))
        seconds_N += np.interp(rows_N, _KNOTS, knots_K)
        seconds_N += theta_F[-1] * np.maximum(rows_N - _KNOTS[-1], 0.0)
        return np.maximum(seconds_N, _LEAST * self._first_s)

    def bounds(self, rows_N: Doubles, work: Work) -> tuple[Doubles, Doubles]:
        """The least and the most that passes with so many rows, ascending, may take: within one standard
        deviation; no less than fewer rows, and no more than in proportion to them."""
        features_NF = np.stack([_features(work._replace(rows=rows)) for rows in rows_N.tolist()])
        seconds_N = np.maximum(features_NF @ self._theta_F, _LEAST * self._first_s)
        variance_N = np.einsum("nf,fg,ng->n", features_NF, self._unknown_FF, features_NF)
        doubt_N = np.exp(np.minimum(np.sqrt(np.maximum(variance_N, 0.0)) / seconds_N, _MOST_DOUBT))
        least_N = np.maximum.accumulate(seconds_N / doubt_N)
        return least_N, rows_N * np.minimum.accumulate(seconds_N * doubt_N / rows_N)

    def learn(self, work: Work, seconds: float, noise: float, *, foreseen: Foreseen | None = None) -> None:
        """Such a pass took so long.

        Args:
            noise: part of the seconds, by which they may be off.
            foreseen: of `work`, if that is known.
        """
        if not self or (self._knows_prompts_only and not work.prompt_rows):
            self._begin(work, seconds)
            noise, foreseen = _FIRST_NOISE, None
        foreseen = foreseen or self.foresee(work)
        self._update(foreseen.features_F, foreseen.unknown_F, seconds, (noise * foreseen.seconds) ** 2)

    def _update(self, features_F: Doubles, unknown_F: Doubles, seconds: float, noise: float) -> None:
        """What would fall below zero is nothing, and the others take its part."""
        theta_F = self._theta_F
        # Nothing gets more unknown than by a part of this very pass: contexts grow a thousandfold.
        renewed_F = features_F * np.sqrt(self._renewed_FF.diagonal())
        share_F = np.minimum(1.0, _MOST_RENEWED * seconds / np.maximum(renewed_F, _TINY))
        gain_F = unknown_F / (float(features_F @ unknown_F) + noise)
        new_F = theta_F + gain_F * (seconds - float(features_F @ theta_F))
        while not (above_F := (new_F >= 0.0) | (features_F == 0.0)).all():
            self._part(above_F)
            features_F, theta_F = features_F * above_F, theta_F * above_F
            unknown_F = self._unknown_FF @ features_F
            gain_F = unknown_F / (float(features_F @ unknown_F) + noise)
            new_F = theta_F + gain_F * (seconds - float(features_F @ theta_F))
        self._theta_F = np.maximum(new_F, 0.0)
        shrunk_FF = self._unknown_FF - gain_F[:, None] * unknown_F
        self._unknown_FF = shrunk_FF + self._renewed_FF * np.outer(share_F, share_F)

    def _part(self, above_F: NDArray[np.bool_]) -> None:
        """Those that are nothing say nothing of the others from now on; how unknown they are remains."""
        together_FF = np.outer(above_F, above_F)
        np.fill_diagonal(together_FF, True)
        self._unknown_FF *= together_FF

    def _begin(self, work: Work, seconds: float) -> None:
        """All that is thought follows from one pass."""
        theta_F, spread_FF = _thought(max(work.context, _USUAL_CONTEXT))
        scale = seconds / float(_features(work) @ theta_F)
        self._theta_F, self._unknown_FF = scale * theta_F, scale**2 * spread_FF
        self._unknown_FF[_ALWAYS, _ALWAYS] = (0.5 * seconds) ** 2
        self._renewed_FF, self._first_s = _FORGET * self._unknown_FF, seconds
        self._knows_prompts_only = not work.requests

    def _at_least(self, seconds: float) -> float:
        return max(seconds, _LEAST * self._first_s)

    # Between starts.

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {"seconds": self._theta_F.tolist(), "first_s": self._first_s}

    def read(self, kept: Mapping[str, Any]) -> None:
        """What `as_json` gave. Raises ValueError, TypeError, KeyError or AttributeError for anything else."""
        theta_F, first_s = np.array(kept["seconds"], dtype=np.float64), float(kept["first_s"])
        if theta_F.shape != (_NUM,) or not (np.isfinite(theta_F).all() and (theta_F >= 0).all()):
            raise ValueError("coefficients are numbers, not below 0")
        if not (math.isfinite(first_s) and first_s > 0):
            raise ValueError("seconds are numbers above 0")
        spread_FF = first_s**2 * _thought(_USUAL_CONTEXT)[1]
        self._theta_F, self._first_s, self._knows_prompts_only = theta_F, first_s, False
        self._unknown_FF, self._renewed_FF = _KEPT * spread_FF, _FORGET * spread_FF

    def become(self, other: StepTimes) -> None:
        """The same as another, for all who share these."""
        self._theta_F, self._unknown_FF = other._theta_F.copy(), other._unknown_FF.copy()
        self._renewed_FF, self._first_s = other._renewed_FF, other._first_s
        self._knows_prompts_only = other._knows_prompts_only


def _features(work: Work) -> Doubles:
    features_F = np.zeros(_NUM)
    if work.requests:
        features_F[_ALWAYS] = 1.0
        features_F[_REQUESTS] = work.requests
        features_F[_ATTENTION] = work.context * work.rows / work.requests
        features_F[_FIRST_SEGMENT:-1] = np.clip(work.rows, _KNOTS[:-1], _KNOTS[1:]) - _KNOTS[:-1]
        features_F[-1] = max(work.rows - _KNOTS[-1], 0.0)
    features_F[_CONTEXT] = work.context
    if work.prompt_rows:
        features_F[_PROMPT], features_F[_PROMPT_ROWS] = 1.0, work.prompt_rows
    return features_F


def _thought(usual_context: float) -> tuple[Doubles, Doubles]:
    """Coefficients before anything was measured, and their covariance, for a first step of one second."""
    theta_F, deviation_F = np.zeros(_NUM), np.zeros(_NUM)
    theta_F[_ALWAYS], deviation_F[_ALWAYS] = 1.0 - _REQUEST[0], 0.5
    theta_F[_REQUESTS], deviation_F[_REQUESTS] = _REQUEST
    deviation_F[_CONTEXT] = _LOOKING_BACK / usual_context
    deviation_F[_ATTENTION] = _LOOKED_AT / usual_context
    theta_F[_PROMPT_ROWS] = _ROW[0]
    deviation_F[_PROMPT], deviation_F[_PROMPT_ROWS] = _PROMPTS, _PROMPTS_ROW
    spread_FF = np.diag(deviation_F**2)
    theta_F[_FIRST_SEGMENT:] = _ROW[0]
    # A segment's rows cost about what those of the one before do: a random walk.
    walk = np.arange(len(_KNOTS))
    shared = 1.0 + _TURN**2 * np.minimum(walk[:, None], walk[None, :])
    spread_FF[_FIRST_SEGMENT:, _FIRST_SEGMENT:] = _ROW[1] ** 2 * shared
    return theta_F, spread_FF
