"""`manta bench sweep`: plain decoding, the adaptive engine, fixed draft lengths and other methods by load.

It measures all sides (`engines.py`) at every load and temperature, in alternation: a turn is one side's pass
over some requests; the other sides' turns over the same requests follow, in rotating order, so speeds and
ratios of a round are for the same work at nearly the same time. Medians are taken over rounds. Runs in this
process, without Ray, and without the prefix cache, because prompts repeat. It writes its file after every
point. `tests/benchmarks` judges the policy with it (`sweep`), and measures the first seconds of engines
(`starts`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from ....actors.system.atomic_files import rounded
from ....actors.tokenization.prompts import load_tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...common.plots import Picture, draw_lines
from ...common.tables import decimals, print_table
from ..common.engine_passes import Figures, PromptRow, read_rows, record, rotated, say
from ..common.idle_check import Watch, print_warning
from ..common.options import SweepOptions
from ..common.request_source import RequestSource, encode_rows
from .engines import PLAIN, Driver, open_sides
from .load_records import LoadPass, Sums, acceptance_json, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KEPT = ("requests", "user_tokens_per_s", "tokens_per_s")  # of an operating point


def run_sweep(
    config: EngineConfig,
    options: SweepOptions,
    make_source: Callable[[Sequence[PromptRow], int, float], RequestSource] = RequestSource,
) -> Figures:
    """Measure all methods at each temperature and number of requests, and record after each point.

    The minutes that are left are divided equally among the points to come.
    """
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: a sweep compares draft lengths. Give --spec-model.",
            param="speculative_config",
        )
    begin_s = time.monotonic()
    config = replace(config, enable_prefix_caching=False, max_num_seqs=max(options.concurrency))
    rows = encode_rows(read_rows(options.prompts, options.num_prompts), load_tokenizer(config))
    points: list[Figures] = []
    figures: Figures = {}
    with open_sides(config, options.methods, methods_only=options.methods_only) as sides:
        todo = list(product(sorted(set(options.temperatures)), sorted(set(options.concurrency))))
        for number, (temperature, requests) in enumerate(todo):
            budget_s = (60.0 * options.minutes - (time.monotonic() - begin_s)) / (len(todo) - number)
            source = make_source(rows, options.max_tokens, temperature)
            measured = measure(requests, sides.drivers, source, options.rounds, budget_s)
            points.append({"temperature": temperature, **point_figures(measured, sides.fixed)})
            print_point(points[-1])
            more = {
                "complete": len(points) == len(todo),
                "measured_in_s": round(time.monotonic() - begin_s, 1),
                "refused": sides.refused,
            }
            figures = record(config, options, points, more)
    for name, why in figures["refused"].items():
        print(f"{name} was refused: {why}")
    return figures


def print_point(point: Figures) -> None:
    columns = ["side", "tok/s", "to plain", "to best", "tok/step", "drafts/step", "accepted"]
    columns += ["skipped", "ttft p50", "itl p99", "identical"]
    rows = [
        [
            name + (" *" if name == point["best"] else ""),
            f"{side['tokens_per_s']:.1f}",
            f"{side['ratio_to_plain']:.3f}",
            f"{side['ratio_to_best']:.3f}",
            *(
                decimals(side[key])
                for key in ("tokens_per_step", "drafts_per_step", "mean_acceptance_length")
            ),
            f"{side['skipped_passes']:.0%}" if side["skipped_passes"] else "-",
            _ms(side["ttft_ms"], "p50"),
            _ms(side["itl_ms"], "p99"),
            "yes" if side["identical"] else "no",
        ]
        for name, side in point["sides"].items()
    ]
    title = f"{point['requests']} request(s), T = {point['temperature']:g}"
    print_table(f"{title}; * is the best of plain and fixed lengths", columns, rows)
    print_warning([point["idleness"]])


def _ms(described: Figures | None, name: str) -> str:
    return "-" if described is None else f"{described[name]:.1f}"


MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PointPasses:
    """Passes of all sides, one per round; round i ran the requests of `parts[i]`."""

    requests: int  # in flight
    parts: list[range]
    passes: dict[str, list[LoadPass]]
    watch: Watch


def measure(
    requests: int, drivers: Mapping[str, Driver], source: RequestSource, rounds: int, budget_s: float
) -> PointPasses:
    """Measure in LEAST_ROUNDS to `rounds` rounds; `budget_s` is for all sides together."""
    begin_s = time.monotonic()
    minimum = max(requests, 2)
    # Warm-up. Its duration also determines how many requests fit into the budget.
    slowest_s = max(driver.closed(source, range(minimum), requests).seconds for driver in drivers.values())
    left_s = max(budget_s - (time.monotonic() - begin_s), 0.0)
    rounds, count = _plan(minimum, slowest_s, left_s / len(drivers), rounds)
    parts = [range(begin, begin + count) for begin in range(0, rounds * count, count)]
    passes: dict[str, list[LoadPass]] = {name: [] for name in drivers}
    watch = Watch()
    with watch.open():
        for number, part in enumerate(parts):
            say(f"{requests} request(s), round {number + 1}/{rounds}, {count} requests")
            for name in rotated(list(drivers), number):
                passes[name].append(drivers[name].closed(source, part, requests))
    return PointPasses(requests, parts, passes, watch)


def _plan(minimum: int, min_s: float, side_s: float, max_rounds: int) -> tuple[int, int]:
    """Return rounds and requests per round for `side_s` seconds; longer rounds are preferred to more."""
    fit = side_s / min_s
    rounds = max(min(max_rounds, int(fit / 2)), min(MIN_ROUNDS, max_rounds))
    return rounds, max(minimum, int(minimum * fit / rounds))


def point_figures(measured: PointPasses, fixed: Sequence[str]) -> Figures:
    """Return the figures of all sides as JSON; the *best* side is the fastest of plain and fixed lengths."""
    passes = measured.passes
    best = max((PLAIN, *fixed), key=lambda name: statistics.median(_speeds(passes[name])))
    expected = _tokens(measured, PLAIN)
    return {
        "requests": measured.requests,
        "rounds": len(measured.parts),
        "requests_per_round": len(measured.parts[0]),
        "best": best,
        "sides": {
            name: _figures_of_side(name, passes, best, shows_drafts=name not in fixed[:-1])
            | {"identical": _tokens(measured, name) == expected}
            for name in passes
        },
        "idleness": measured.watch.found.as_json(),
    }


def _tokens(measured: PointPasses, name: str) -> list[list[int]]:
    """Return a side's answers, without those that only kept the load constant."""
    return [
        answer.token_ids
        for part, done in zip(measured.parts, measured.passes[name], strict=True)
        for answer in sorted(done.answers, key=lambda answer: answer.number)
        if answer.number in part
    ]


def _figures_of_side(
    name: str, passes: Mapping[str, Sequence[LoadPass]], best: str, *, shows_drafts: bool
) -> Figures:
    """Return the figures of a method's passes, and its speed relative to the plain and the `best` method."""
    mine = passes[name]
    answers = [answer for done in mine for answer in done.answers]
    sums = Sums.of([block for answer in answers for block in answer.blocks])
    waits = [answer.waits for answer in answers if answer.ended_s is not None and answer.blocks]
    to_plain, to_best = (_ratios(mine, passes[other]) for other in (PLAIN, best))
    parts = {part for done in mine for part in done.step_seconds}
    return {
        "tokens_per_s": round(statistics.median(done.tokens_per_s for done in mine), 2),
        "rounds_tokens_per_s": [round(done.tokens_per_s, 2) for done in mine],
        "user_tokens_per_s": round(statistics.median(_speeds(mine)), 2),
        "ratio_to_plain": round(statistics.median(to_plain), 4),
        "rounds_ratio_to_plain": [round(ratio, 4) for ratio in to_plain],
        "ratio_to_best": round(statistics.median(to_best), 4),
        "rounds_ratio_to_best": [round(ratio, 4) for ratio in to_best],
        "tokens": sum(done.tokens for done in mine),
        "seconds": round(sum(done.seconds for done in mine), 3),
        "tokens_per_step": rounded(sums.tokens_per_step),
        "mean_acceptance_length": rounded(sums.mean_acceptance_length),
        "drafts_per_step": rounded(sum(sums.drafted) / sums.num_blocks if sums.num_blocks else None),
        "skipped_passes": round(sum(d.num_skipped for d in mine) / max(sum(d.num_steps for d in mine), 1), 4),
        "acceptance": acceptance_json(answers) if shows_drafts else {},
        "step_seconds": {
            part: round(sum(done.step_seconds.get(part, 0.0) for done in mine), 4) for part in sorted(parts)
        },
        **describe(waits),
    }


def _speeds(passes: Sequence[LoadPass]) -> list[float]:
    return [done.user_tokens_per_s for done in passes]


def _ratios(ours: Sequence[LoadPass], theirs: Sequence[LoadPass]) -> list[float]:
    return [mine / other for mine, other in zip(_speeds(ours), _speeds(theirs), strict=True)]


def sweep_curves(figures: Figures) -> dict[str, list[Figures]]:
    own = figures["engine"]["speculative_config"]["method"]
    names = {"plain": "plain", "adaptive": own, **{m: m for m in figures["options"]["methods"]}}
    by_temperature = _closed(figures)
    return {
        shown + (f", T = {temperature:g}" if len(by_temperature) > 1 else ""): [
            {key: (point["sides"][side] | {"requests": point["requests"]})[key] for key in _KEPT}
            for point in points
        ]
        for temperature, points in by_temperature.items()
        for side, shown in names.items()
        if side in points[0]["sides"]
    }


def pareto_picture(curves: Mapping[str, Sequence[Figures]], per: str) -> Picture:
    """Return the chart of throughput against interactivity, a curve per method; `per`: "GPU" or "machine"."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, points in curves.items():
        ordered = sorted(points, key=lambda point: (point["requests"], -point["user_tokens_per_s"]))
        series[name] = [(point["user_tokens_per_s"], point["tokens_per_s"]) for point in ordered]

    def draw(axes: Axes) -> None:
        draw_lines(axes, series, "tokens/s per user", f"tokens/s per {per}")
        axes.set_xlim(left=0)

    return Picture("pareto", draw)


def sweep_pictures(figures: Figures) -> list[Picture]:
    per = "GPU" if figures["provenance"]["gpu"] else "machine"
    by_temperature = _closed(figures)
    speedups = [_speedup(points, temperature) for temperature, points in by_temperature.items()]
    return [pareto_picture(sweep_curves(figures), per), *speedups] if speedups else []


def _closed(figures: Figures) -> dict[float, list[Figures]]:
    """Return the points by temperature; older files have mixed traffic, too, and a single temperature."""
    found: dict[float, list[Figures]] = {}
    only = figures["options"].get("temperature", 0.0)
    for point in figures["points"]:
        if point.get("traffic") != "mixed":
            found.setdefault(point.get("temperature", only), []).append(point)
    return found


def _speedup(points: Sequence[Figures], temperature: float) -> Picture:
    """Plot speed-ups over plain decoding; fixed lengths are drawn faint."""
    sides = [name for name in points[0]["sides"] if name != "plain"]
    sides.sort(key=lambda name: "-" in name)  # main sides first: the first colors differ most
    series = {
        side: [(p["requests"], p["sides"][side]["ratio_to_plain"]) for p in points if side in p["sides"]]
        for side in sides
    }
    loads = [point["requests"] for point in points]

    def draw(axes: Axes) -> None:
        faint = [side for side in sides if "-" in side]
        draw_lines(axes, series, "requests at once", "speed-up", faint=faint)
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])

    name = "speedup-by-load" + (f"-t{temperature:g}" if temperature else "")
    return Picture(name, draw, (6.4, 4.4))
