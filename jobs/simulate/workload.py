"""Lengths of prompts and answers of a simulated load, drawn from a seed or taken from a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cluster.errors import ConfigError
from ...cluster.request.request import Request
from ...cluster.simulation.simulated_engine import simulated_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lognormal lengths of prompts and answers, or those of a trace, used cyclically.

    `sigma`: standard deviation of the logarithm; sequences are cut at `max_tokens`.
    """

    prompt_tokens: float = 1024.0
    output_tokens: float = 512.0
    sigma: float = 0.4
    max_tokens: int = 131_072
    seed: int = 0
    trace: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if not getattr(self, name) >= 1.0:
                raise ConfigError(f"{name}={getattr(self, name):g} must be at least 1.", param=name)
        if self.prompt_tokens + self.output_tokens > self.max_tokens:
            raise ConfigError(
                f"prompt_tokens + output_tokens = {self.prompt_tokens + self.output_tokens:g} exceeds "
                f"max_model_len={self.max_tokens}.",
                param="prompt_tokens",
            )

    @property
    def mean_tokens(self) -> int:
        if self.trace:
            return round(sum(map(sum, self.trace)) / len(self.trace))
        return round(self.prompt_tokens + self.output_tokens)

    def lengths(self, number: int) -> tuple[int, int]:
        if self.trace:
            return self.trace[number % len(self.trace)]
        dice = np.random.default_rng([self.seed, number])
        scale = np.exp(self.sigma * dice.standard_normal(2) - self.sigma**2 / 2.0)
        prompt = min(max(round(self.prompt_tokens * scale[0]), 1), self.max_tokens - 1)
        return prompt, min(max(round(self.output_tokens * scale[1]), 1), self.max_tokens - prompt)

    def request(self, number: int, share: float = 1.0) -> Request:
        """Make a request with `share` of its answer, for requests that are in progress at the start."""
        prompt, output = self.lengths(number)
        return simulated_request(number, prompt, max(round(share * output), 1))
