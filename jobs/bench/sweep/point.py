"""Measures one point of a sweep, a load on all sides in alternation, and computes its figures.

A turn is one side's pass over some requests; the other sides' turns over the same requests follow, in
rotating order. Speeds and ratios of a round are thus for the same work at nearly the same time. Medians are
taken over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....actors.system.atomic_files import rounded
from ..common.engine_passes import Figures, rotated, say
from ..common.idle_check import Watch
from ..common.request_source import RequestSource
from .engine_driver import Driver
from .engines import PLAIN
from .load_records import LoadPass, Sums, acceptance_json, describe

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
