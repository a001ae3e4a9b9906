"""The traffic of a simulated day: generated from a seed or read from a trace."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from manta.cluster.errors import ConfigError
from manta.jobs.plan.pair_reader import read_trace

from .replicas import Arrivals, Floats

DAY_S = 86_400.0
SIGMA = 0.6  # standard deviation of the logarithm of lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Traffic of a day: a daily wave plus bursts, with Poisson arrivals and lognormal lengths.

    Attributes:
        peak_per_s: requests/s at the peak of the day, without bursts.
        night: rate of the quietest moment as a share of the peak.
        bursts: number of bursts, each between 3 and 10 minutes long.
        burst: additional rate of a burst as a share of the peak.
        prompt_tokens, output_tokens: mean lengths.
        hours: length of the simulated part of the day, which begins at the quietest moment.
        seed: seed of all random numbers.
    """

    peak_per_s: float = 20.0
    night: float = 0.15
    bursts: int = 12
    burst: float = 0.5
    prompt_tokens: float = 800.0
    output_tokens: float = 2500.0
    hours: float = 24.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("peak_per_s", "prompt_tokens", "output_tokens", "hours"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name}={getattr(self, name):g} must be above 0.", param=name)


def make_day(day: Day) -> Arrivals:
    """Return the arrivals of a day. Equal fields give equal arrivals."""
    rng = np.random.default_rng(day.seed)
    grid_s = np.arange(0.0, day.hours * 3600.0, 1.0)
    hours = grid_s / 3600.0
    wave = day.night + (1.0 - day.night) * (0.5 - 0.5 * np.cos(hours / 24.0 * 2.0 * np.pi))
    for begin_s, length_s in zip(
        rng.uniform(0.0, DAY_S, day.bursts), rng.uniform(180.0, 600.0, day.bursts), strict=True
    ):
        wave[(grid_s >= begin_s) & (grid_s < begin_s + length_s)] += day.burst
    counts = rng.poisson(day.peak_per_s * wave)
    arrival_s = np.sort(np.repeat(grid_s, counts) + rng.uniform(0.0, 1.0, counts.sum()))
    lengths = (_lengths(rng, mean, len(arrival_s)) for mean in (day.prompt_tokens, day.output_tokens))
    return Arrivals(arrival_s, *lengths)


def _lengths(rng: np.random.Generator, mean: float, count: int) -> Any:  # Any: an array of ints
    drawn: Floats = rng.lognormal(np.log(mean) - SIGMA**2 / 2.0, SIGMA, count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def read_arrivals(path: Path) -> Arrivals:
    """Return the arrivals of a trace in the format of `manta plan`. Raises like `read_trace`."""
    trace = sorted(read_trace(path, sys.maxsize), key=lambda arrival: arrival.arrival_s)
    return Arrivals(
        np.array([arrival.arrival_s for arrival in trace], dtype=np.float64),
        np.array([arrival.prompt_tokens for arrival in trace], dtype=np.int64),
        np.array([arrival.output_tokens for arrival in trace], dtype=np.int64),
    )
