"""Options of the benchmarks; their flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from manta.cluster.config import one_of
from manta.cluster.errors import ConfigError
from manta.cluster.flag import Flag
from manta.jobs.bench.common.options import Loads, RunOptions, SweepOptions, Temperatures
from manta.jobs.common.options import check_least

SERVE_TAX_SIDES = ("engine", "actor", "asgi", "serve")
PLAIN_SIDES = ("engine-plain", "serve-plain")
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
class CouplingOptions(RunOptions):
    """Options of `couplings`.

    Attributes:
        drafts: drafts of a block; by default all of the drafter's.
        temperatures: sampling temperature; may be repeated.
    """

    drafts: int | None = None
    temperatures: Temperatures = (1.0,)

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if lost := [each for each in self.temperatures if each <= 0]:
            raise ConfigError(f"temperatures={lost[0]:g} must be above 0.", param="temperatures")


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
