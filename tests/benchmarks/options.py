"""Options of the benchmarks; their flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from manta.actors.http.config.settings import parse_replicas
from manta.cluster.config import one_of
from manta.cluster.errors import ConfigError
from manta.cluster.flag import NO_FLAG, Flag, Size
from manta.cluster.fleet.autoscaling import ScalingRules
from manta.cluster.hardware.gpu_specs import GPUS
from manta.jobs.bench.common.options import (
    CONCURRENCY,
    Loads,
    RunOptions,
    SweepOptions,
    Temperature,
    Temperatures,
)
from manta.jobs.common.options import check_least

from .arrivals import Arrivals

SharedDrafterSide = Literal["shared", "split", "colocated"]
BATCH_SIDES = ("job", "llm", "http", "generate", "engines")
SERVE_TAX_SIDES = ("engine", "actor", "asgi", "serve")
PLAIN_SIDES = ("engine-plain", "serve-plain")
SHARED_DRAFTER_SIDES: tuple[SharedDrafterSide, ...] = get_args(SharedDrafterSide)
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
class BusyOptions(RunOptions):
    """Options of `busy`.

    Attributes:
        busy: number of busy processes, each of which uses one core; may be repeated; by default 1, 2 and 4,
            or none with --cpu-quota.
        cpu_quotas: CPU quota in cores, such as 1.5; may be repeated. Needs root on Linux.
    """

    num_prompts: int = 24
    rounds: int = 5
    busy: tuple[int, ...] = ()
    cpu_quotas: Annotated[tuple[float, ...], Flag("--cpu-quota", metavar="CORES")] = ()

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if not self.busy and not self.cpu_quotas:
            object.__setattr__(self, "busy", (1, 2, 4))
        if self.busy:
            check_least(self, 1, "busy")
        if min(self.cpu_quotas, default=1) <= 0:
            raise ConfigError(f"cpu_quotas={self.cpu_quotas} must be above 0.", param="cpu_quotas")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBenchOptions(RunOptions):
    """Options of `batch`.

    Attributes:
        rows: rows of the dataset, which are the file's prompts, repeated.
        sides: side to run; may be repeated.
        engines: engines of the job that measures how busy they are.
    """

    num_prompts: Annotated[int, NO_FLAG] = 20
    concurrency: Annotated[tuple[int, ...], NO_FLAG] = (1, 8)
    rows: int = 2000
    max_tokens: int = 64
    sides: Sides = BATCH_SIDES
    engines: int = 2

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_least(self, 1, "rows", "engines")
        for name in self.sides:
            one_of("side", name, BATCH_SIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOptions(RunOptions):
    """Options of `background`.

    Attributes:
        rates: online requests per second; may be repeated, one point each.
        num_requests: online requests of each side in a round.
        lines: lines of the batch, enough that it ends after the requests.
        max_tokens: mean output tokens of a request; requests vary from 0.5 to 1.5 times this.
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
        check_least(self, 1, "num_requests", "lines")
        for rate in self.rates:
            Arrivals(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySweepOptions(SweepOptions):
    """Options of `sweep`.

    Attributes:
        mixed: requests at once with mixed traffic; may be repeated.
    """

    mixed: tuple[int, ...] = (8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsOptions(RunOptions):
    """Options of `starts`.

    Attributes:
        concurrency: requests at once in closed loops; may be repeated, a start with each.
        window_s: seconds that are measured after a start and after a change of load.
    """

    num_prompts: Annotated[int, NO_FLAG] = 240
    concurrency: Loads = CONCURRENCY
    rounds: int = 1
    window_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDrafterOptions(RunOptions):
    """Options of `shared-drafter`.

    Attributes:
        concurrency: concurrent requests per engine; may be repeated, one point each.
        engines: number of engines on this machine; may be repeated, one point each.
        sides: placements of the drafter to compare.
        rounds: turns of each side; the median is reported.
        seconds: duration of a turn.
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
        check_least(self, 1, "engines")
        if self.seconds <= 0.0:
            raise ConfigError(f"seconds={self.seconds:g} must be more than 0.", param="seconds")

    @property
    def points(self) -> list[tuple[int, int]]:
        """Return (engines, requests per engine) of each point."""
        return [(engines, requests) for requests in self.concurrency for engines in self.engines]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of `simulate-validate`.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: number of prompts, used cyclically.
        concurrency: concurrent requests; may be repeated.
        requests: measured requests at each load, after a warm-up of as many requests plus the concurrency.
        max_tokens: output tokens of a request.
        temperature: 0 is greedy.
        spread: standard deviation of requests' hardness, see cluster/simulation/acceptance_mix.py.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of `simulate-fleet`: traffic of a day, a replica, and the scaling policies.

    Attributes:
        trace: JSONL of arrival_s, prompt_tokens, output_tokens, instead of synthetic traffic.
        peak_per_s: requests/s at the peak of the day.
        bursts: sudden rises in a day.
        prompt_tokens: mean length of prompts.
        output_tokens: mean length of answers.
        hours: hours to simulate, from the quietest one on.
        seed: seed of the traffic.
        replicas: bounds of the number of replicas.
        start_s: seconds from the decision to start a replica until it serves.
        max_num_seqs: concurrent requests of a replica.
        kv_tokens: tokens that the K/V pages of a replica hold.
        step_ms: minimum time of a verify pass.
        row_ms: time of a row in a verify pass that is bound by rows.
        draft_ms: time of a drafter's pass.
        acceptance: conditional acceptance probability of each draft.
        model: target of an engine on GPUs, which is simulated instead of using the times, --acceptance and
            --kv-tokens.
        drafter: drafter of this engine.
        gpu: kind of its GPUs.
        tp: GPUs of a replica.
        method: a method of `manta simulate node`; by default dflash with a drafter, else plain.
        acceptance_length: mean acceptance length, as node's --acceptance.
        spread: standard deviation of requests' hardness.
        scaling: settings of our policy, such as '{"load_high": 0.8}'.
        target_ongoing_requests: settings of Ray's policy to compare with; 2 is its default; may be repeated.
        ray: also simulate Ray's policy, which is slow for large fleets.
        output: JSON file for the figures.
    """

    trace: Path | None = None
    peak_per_s: Annotated[float, Flag("--peak")] = 20.0
    bursts: int = 12
    prompt_tokens: float = 800.0
    output_tokens: float = 2500.0
    hours: float = 24.0
    seed: int = 0
    replicas: Annotated[tuple[int, int], Flag(metavar="LEAST:MOST", parser=parse_replicas)] = (1, 100)
    start_s: float = 60.0
    max_num_seqs: int = 16
    kv_tokens: Size = 200_000
    step_ms: float = 25.0
    row_ms: float = 0.2
    draft_ms: float = 3.0
    acceptance: float = 0.75
    model: Annotated[str | None, Flag("-m")] = None
    drafter: Annotated[str | None, Flag("--drafter --spec-model")] = None
    gpu: Annotated[str, Flag(metavar="|".join(GPUS))] = "b300"
    tp: int = 1
    method: str | None = None
    acceptance_length: str = "4.0"
    spread: float = 0.5
    scaling: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    target_ongoing_requests: tuple[float, ...] = (2.0, 4.0, 6.0, 8.0, 9.0, 10.0, 11.0, 12.0)
    ray: bool = True
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance < 1.0:
            raise ConfigError(f"acceptance={self.acceptance:g} must lie in [0, 1).", param="acceptance")
        if self.start_s < 0.0:
            raise ConfigError(f"start_s={self.start_s:g} must be 0 or more seconds.", param="start_s")
        if self.max_num_seqs < 1 or self.kv_tokens < 1:
            raise ConfigError("max_num_seqs and kv_tokens must be at least 1.", param="max_num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of `simulate-policy`.

    Attributes:
        model: targets: folders or Hugging Face ids, whose configurations are enough; may be repeated.
        drafter: DFlash drafter of each target, in the same order.
        gpu: kind of the GPUs.
        tp: tensor-parallel ranks of the engine; may be repeated.
        acceptance: mean acceptance length of the whole block, see `parse_acceptance`; may be repeated.
        spread: standard deviation of requests' hardness; 0: equal. See
            `cluster/simulation/acceptance_mix.py`.
        contexts: tokens of prompts; may be repeated.
        concurrency: concurrent requests; may be repeated.
        output_tokens: tokens of an answer.
        output: JSON file for the figures.
    """

    model: Annotated[tuple[str, ...], Flag("-m")]
    drafter: Annotated[tuple[str, ...], Flag("--drafter --spec-model")]
    gpu: Annotated[str, Flag(metavar="|".join(GPUS))] = "h200"
    tp: tuple[int, ...] = (1,)
    acceptance: tuple[str, ...] = ("4.0",)
    spread: float = 0.5
    contexts: Annotated[tuple[Size, ...], Flag("--context")] = (1024, 8192, 65536)
    concurrency: tuple[int, ...] = (1, 4, 16, 64, 256)
    output_tokens: int = 192
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        if len(self.model) != len(self.drafter):
            raise ConfigError(
                f"drafter: {len(self.drafter)} for {len(self.model)} target(s). Give --drafter once for each "
                "--model.",
                param="drafter",
            )
        for name in ("tp", "contexts", "concurrency"):
            if min(getattr(self, name), default=0) < 1:
                raise ConfigError(f"{name}={list(getattr(self, name))} must be at least 1.", param=name)
