"""Options of the benchmarks; their flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from manta.actors.http.config.settings import parse_replicas
from manta.cluster.config import one_of
from manta.cluster.errors import ConfigError
from manta.cluster.flag import NO_FLAG, Flag
from manta.cluster.fleet.autoscaling import ScalingRules
from manta.jobs.bench.common.options import (
    Loads,
    RunOptions,
    SweepOptions,
    Temperatures,
)
from manta.jobs.common.options import check_least

SERVE_TAX_SIDES = ("engine", "actor", "asgi", "serve")
PLAIN_SIDES = ("engine-plain", "serve-plain")
QUICK_RULES = ScalingRules(up_after_s=1.0, down_after_s=10.0)
Sides = Annotated[tuple[str, ...], Flag("--side")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(RunOptions):
    """Options of `compare`.

    Attributes:
        num_prompts: number of prompts, taken evenly from the file; few, since `generate` is slow.
        server: URL of an OpenAI-compatible server of the same target.
        server_model: name of the target there; by default the first that the server lists.
    """

    num_prompts: int = 16
    server: Annotated[str | None, Flag(metavar="URL")] = None
    server_model: str | None = None

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.server_model is not None and self.server is None:
            raise ConfigError(
                f"server_model={self.server_model!r} names a model of a server: give --server, too.",
                param="server",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySweepOptions(SweepOptions):
    """Options of `sweep`.

    Attributes:
        mixed: requests at once with mixed traffic; may be repeated.
    """

    mixed: tuple[int, ...] = (8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTaxOptions(RunOptions):
    """Options of `serve-tax`. Every combination of concurrency and temperature is a point.

    Attributes:
        concurrency: concurrent streams; may be repeated.
        temperatures: sampling temperature; 0 is greedy; may be repeated.
        sides: side to run; may be repeated. `engine-plain` and `serve-plain` decode without speculation.
        peers: command of another OpenAI-compatible server of the same target, with {port}; may be repeated.
    """

    concurrency: Loads = (1, 8, 32)
    temperatures: Temperatures = (0.0, 1.0)
    sides: Sides = SERVE_TAX_SIDES
    peers: Annotated[tuple[str, ...], Flag("--peer", metavar="COMMAND")] = ()

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in self.sides:
            one_of("side", name, (*SERVE_TAX_SIDES, *PLAIN_SIDES))
        if lost := [command for command in self.peers if "{port}" not in command]:
            raise ConfigError(f"peers={lost[0]!r} must contain {{port}}.", param="peers")
        check_least(self, 0, "temperatures")

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(streams, t) for t in self.temperatures for streams in self.concurrency]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Options of `scale`.

    Attributes:
        replicas: bounds of the number of replicas.
        rules: settings of the scaling policy, faster than the defaults.
        few: clients at the lowest load.
        many: clients at the highest load; by default 25 % more than needed for the maximum of replicas.
        hold_s: seconds of each load after the number of replicas is reached.
        timeout_s: seconds in which the number of replicas must be reached.
        max_tokens: output tokens of a request.
        output: JSON file for the figures.
        plot: SVG or PNG of the course over time.
    """

    # With a parser the flag takes one text; otherwise a tuple is a flag that may be repeated.
    replicas: Annotated[tuple[int, int], Flag(metavar="LEAST:MOST", parser=parse_replicas)] = (1, 3)
    rules: Annotated[ScalingRules, NO_FLAG] = QUICK_RULES
    few: Annotated[int, NO_FLAG] = 1
    many: Annotated[int | None, Flag("--clients")] = None
    hold_s: Annotated[float, Flag("--hold")] = 20.0
    timeout_s: Annotated[float, NO_FLAG] = 300.0
    max_tokens: int = 128
    output: Annotated[Path | None, Flag("-o")] = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.replicas[0] < self.replicas[1]:
            raise ConfigError(
                f"replicas={self.replicas[0]}:{self.replicas[1]} must be LEAST:MOST, such as 1:3 or 0:3.",
                param="replicas",
            )
        if self.few < 1 or (self.many is not None and self.many <= self.few):
            raise ConfigError(f"many={self.many} must be more than few={self.few}.", param="many")

    def height(self, slots: int) -> int:
        """Return the clients at the highest load, for replicas with `slots` concurrent requests.

        Raises:
            ConfigError: the given number of clients is too small for the maximum of replicas.
        """
        enough = math.floor((self.replicas[1] - 1) * slots * self.rules.load_high) + 1
        if self.many is None:
            return max(math.ceil(1.25 * enough), self.few + 1)
        if self.many < enough:
            raise ConfigError(
                f"many={self.many} clients do not fill {self.replicas[1]} replicas of max_num_seqs={slots}: "
                f"use at least {enough} --clients, or a smaller --max-num-seqs.",
                param="many",
            )
        return self.many


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """Options of `grammars`.

    Attributes:
        requests: concurrent requests, each with a schema.
        max_tokens: output tokens of a request.
        rounds: repetitions; the median is reported.
        output: JSON file for the figures.
    """

    requests: int = 8
    max_tokens: int = 128
    rounds: Annotated[int, NO_FLAG] = 5
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        check_least(self, 1, "requests", "max_tokens", "rounds")
