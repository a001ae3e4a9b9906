"""What the benchmarks can be asked for; their flags are made of it. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from manta.actors.http.settings import parse_replicas
from manta.cluster.autoscaling import ScalingRules
from manta.cluster.config import one_of
from manta.cluster.errors import ConfigError
from manta.cluster.flag import NO_FLAG, Flag
from manta.jobs.bench.load.arrivals import Arrivals
from manta.jobs.bench.options import Loads, RunOptions, Temperature

SharedDrafterSide = Literal["shared", "split", "colocated"]
BATCH_SIDES = ("job", "llm", "http", "generate", "engines")
SERVE_TAX_SIDES = ("engine", "actor", "asgi", "serve")
SHARED_DRAFTER_SIDES: tuple[SharedDrafterSide, ...] = get_args(SharedDrafterSide)
QUICK_RULES = ScalingRules(up_after_s=1.0, down_after_s=10.0)
Sides = Annotated[tuple[str, ...], Flag("--side")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(RunOptions):
    """What is compared.

    Attributes:
        num_prompts: prompts of the file, spread evenly; `generate` is slow.
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
                f"server_model={self.server_model!r} names a model of a server: give --server too.",
                param="server",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyOptions(RunOptions):
    """What is measured.

    Attributes:
        busy: busy processes beside the engine, each of which wants one core; may be repeated; 1, 2 and 4 by
            default, none with --cpu-quota.
        cpu_quotas: CPU quota in cores, as 1.5; may be repeated. Needs root on Linux.
    """

    num_prompts: int = 24
    rounds: int = 5
    busy: tuple[int, ...] = ()
    cpu_quotas: Annotated[tuple[float, ...], Flag("--cpu-quota", metavar="CORES")] = ()

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if not self.busy and not self.cpu_quotas:
            object.__setattr__(self, "busy", (1, 2, 4))
        if min(self.busy, default=1) < 1:
            raise ConfigError(f"busy={self.busy} must be numbers of at least 1.", param="busy")
        if min(self.cpu_quotas, default=1) <= 0:
            raise ConfigError(f"cpu_quotas={self.cpu_quotas} must be above 0.", param="cpu_quotas")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBenchOptions(RunOptions):
    """What is compared.

    Attributes:
        rows: rows of the dataset: the file's prompts, repeated.
        sides: what takes part; may be repeated.
        engines: engines of the job that is to keep them busy.
    """

    num_prompts: Annotated[int, NO_FLAG] = 20
    concurrency: Annotated[tuple[int, ...], NO_FLAG] = (1, 8)
    rows: int = 2000
    max_tokens: int = 64
    sides: Sides = BATCH_SIDES
    engines: int = 2

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in ("rows", "engines"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)
        for name in self.sides:
            one_of("side", name, BATCH_SIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOptions(RunOptions):
    """What is measured.

    Attributes:
        rates: online requests per second; may be repeated, a point each.
        num_requests: online requests of each side in a round.
        lines: lines of the batch, which must not end before the requests do.
        max_tokens: tokens of a request on average: from half of it to half more.
        temperature: temperature of online requests; 0 is greedy. The batch is greedy.
    """

    num_prompts: Annotated[int, NO_FLAG] = 240
    concurrency: Annotated[tuple[int, ...], NO_FLAG] = (1, 8)
    rates: Annotated[tuple[float, ...], Flag("--request-rate")] = (2.0,)
    num_requests: int = 48
    lines: int = 5000
    temperature: Temperature = 0.0

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in ("num_requests", "lines"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)
        for rate in self.rates:
            Arrivals(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDrafterOptions(RunOptions):
    """What is measured.

    Attributes:
        concurrency: requests at once at each engine; may be repeated, a point each.
        engines: engines at once, on this machine; may be repeated, a point each.
        sides: what takes part.
        rounds: rounds of turns of each side; the median counts.
        seconds: seconds of a side's turn in a round.
        temperature: 0 is greedy.
    """

    concurrency: Loads = (4,)
    engines: tuple[int, ...] = (1, 2, 3)
    sides: Annotated[tuple[SharedDrafterSide, ...], NO_FLAG] = SHARED_DRAFTER_SIDES
    rounds: int = 5
    seconds: float = 3.0
    temperature: Temperature = 0.0

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in self.sides:
            one_of("side", name, SHARED_DRAFTER_SIDES)
        if not self.engines or min(self.engines) < 1:
            raise ConfigError(f"engines={self.engines} must be numbers of at least 1.", param="engines")
        if self.seconds <= 0.0:
            raise ConfigError(f"seconds={self.seconds:g} must be more than 0.", param="seconds")

    @property
    def points(self) -> list[tuple[int, int]]:
        """(engines, requests at each)."""
        return [(engines, requests) for requests in self.concurrency for engines in self.engines]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTaxOptions(RunOptions):
    """What is measured.

    Attributes:
        concurrency: streams that are open at once; may be repeated.
        temperatures: 0 is greedy; may be repeated. A point is one of these with one of `concurrency`.
        sides: what takes part; may be repeated.
    """

    concurrency: Loads = (1, 8, 32)
    temperatures: Annotated[tuple[float, ...], Flag("--temperature -t")] = (0.0, 1.0)
    sides: Sides = SERVE_TAX_SIDES

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in self.sides:
            one_of("side", name, SERVE_TAX_SIDES)
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise ConfigError(
                f"temperatures={self.temperatures} must be numbers of at least 0.", param="temperatures"
            )

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(streams, t) for t in self.temperatures for streams in self.concurrency]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What is run.

    Attributes:
        replicas: the fewest and the most replicas, between which the load drives them.
        rules: rules of the policy; quicker than those that save money.
        few: clients at the lowest load.
        many: clients at once at the height of the load; by default a quarter more than it takes to want the
            most replicas.
        hold_s: seconds that each load lasts after the replicas are as many as they should be.
        timeout_s: seconds for them to become as many.
        max_tokens: tokens of every request.
        output: JSON file for the figures.
        plot: SVG or PNG of it over time.
    """

    # The flag is one text; a tuple alone would be a flag that may be repeated.
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
                f"replicas={self.replicas[0]}:{self.replicas[1]} must be LEAST:MOST, as 1:3 or 0:3.",
                param="replicas",
            )
        if self.few < 1 or (self.many is not None and self.many <= self.few):
            raise ConfigError(f"many={self.many} must be more than few={self.few}.", param="many")

    def height(self, slots: int) -> int:
        """Clients at the height of the load, for replicas of so many slots.

        Raises:
            ConfigError: the policy would not want the most replicas for the clients that were asked for.
        """
        enough = math.floor((self.replicas[1] - 1) * slots * self.rules.load_high) + 1
        if self.many is None:
            return max(math.ceil(1.25 * enough), self.few + 1)
        if self.many < enough:
            raise ConfigError(
                f"many={self.many} clients do not fill {self.replicas[1]} replicas of max_num_seqs={slots}: "
                f"send {enough} at least (--clients), or fewer slots (--max-num-seqs).",
                param="many",
            )
        return self.many


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """What is measured.

    Attributes:
        requests: requests at once, each with a schema.
        max_tokens: tokens of every request.
        rounds: repetitions; the median counts.
        output: JSON file for the figures.
    """

    requests: int = 8
    max_tokens: int = 128
    rounds: Annotated[int, NO_FLAG] = 5
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        for name in ("requests", "max_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """What is compared.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: prompts of the file, asked again in turn.
        concurrency: requests at once; may be repeated.
        requests: requests that are counted at each load; as many, and the clients again, warm up.
        max_tokens: tokens of every answer.
        temperature: 0 is greedy.
        spread: spread of requests' hardness, see cluster/planner/texts.py.
        output: JSON file for the figures.
    """

    prompts: Path = Path("models/prompts.jsonl")
    num_prompts: int = 40
    concurrency: Loads = (1, 4, 16)
    requests: int = 48
    max_tokens: int = 128
    temperature: Temperature = 0.0
    spread: float = 0.5
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        if self.requests < 1 or self.max_tokens < 1 or self.num_prompts < 1 or min(self.concurrency) < 1:
            raise ConfigError(
                "requests, max_tokens, num_prompts and concurrency must be at least 1.", param="requests"
            )
