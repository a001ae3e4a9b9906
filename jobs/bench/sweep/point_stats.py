"""Figures of a point as JSON, computed from its passes, and the verdicts on the bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ....actors.system.atomic_files import rounded
from ..common.engine_passes import Figures
from ..load.latencies import curves, describe
from .cold_start import WHEN
from .engines import ADAPTIVE, PLAIN, RANDOM
from .load_records import LoadPass, Sums, acceptance_json
from .point import PointPasses, same_tokens

BEST_LEAST, PLAIN_LEAST, RANDOM_LEAST, MIXED_LEAST = 0.98, 1.0, 0.97, 1.0


def point_figures(measured: PointPasses, fixed: Sequence[str]) -> Figures:
    """Return the figures of all sides. The *best* side is the fastest of plain and fixed lengths.

    Ratios compare tokens/s per request, which in closed loops equals the ratio of total tokens/s. Acceptance
    by draft position is reported only for the longest fixed length, since shorter ones have the same first
    drafts.
    """
    passes, point = measured.passes, measured.point
    best = max((PLAIN, *fixed), key=lambda name: _median(_speeds(passes[name])))
    same = same_tokens(measured)
    return {
        "traffic": point.traffic,
        "requests": point.requests,
        "request_rate": None if point.arrivals is None else point.arrivals.rate,
        "rounds": len(measured.parts),
        "requests_per_round": len(measured.parts[0]),
        "best": best,
        "sides": {
            name: _side_figures(name, passes, best, tells_drafts=name not in fixed[:-1])
            | {"identical": same[name]}
            for name in passes
        },
        "idleness": measured.watch.found.as_json(),
    }


def _side_figures(
    name: str, passes: Mapping[str, Sequence[LoadPass]], best: str, *, tells_drafts: bool
) -> Figures:
    mine = passes[name]
    answers = [answer for done in mine for answer in done.answers]
    sums = Sums.of([block for answer in answers for block in answer.blocks])
    waits = [answer.waits for answer in answers if answer.ended_s is not None and answer.blocks]
    to_plain, to_best = (_ratios(mine, passes[other]) for other in (PLAIN, best))
    parts = {part for done in mine for part in done.step_seconds}
    return {
        "tokens_per_s": round(_median([done.tokens_per_s for done in mine]), 2),
        "rounds_tokens_per_s": [round(done.tokens_per_s, 2) for done in mine],
        "user_tokens_per_s": round(_median(_speeds(mine)), 2),
        "ratio_to_plain": round(_median(to_plain), 4),
        "rounds_ratio_to_plain": [round(ratio, 4) for ratio in to_plain],
        "ratio_to_best": round(_median(to_best), 4),
        "rounds_ratio_to_best": [round(ratio, 4) for ratio in to_best],
        "tokens": sum(done.tokens for done in mine),
        "seconds": round(sum(done.seconds for done in mine), 3),
        "tokens_per_step": rounded(sums.tokens_per_step),
        "mean_acceptance_length": rounded(sums.mean_acceptance_length),
        "drafts_per_step": rounded(sum(sums.drafted) / sums.num_blocks if sums.num_blocks else None),
        "acceptance": acceptance_json(answers) if tells_drafts else {},
        "step_seconds": {
            part: round(sum(done.step_seconds.get(part, 0.0) for done in mine), 4) for part in sorted(parts)
        },
        **describe(waits),
        "curves": curves(waits),
    }


def verdicts(points: Sequence[Figures], starts: Sequence[Figures]) -> list[Figures]:
    """Return for each bar and point the minimum, the measured value, and whether the bar is met."""
    found: list[Figures] = []
    for point in points:
        if point["requests"] is None:
            continue  # in an open loop every side that keeps up is as fast as the load
        for bar, side, ratio, least in _bars(point["traffic"]):
            if (figures := point["sides"].get(side)) is not None:
                where = f"{point['requests']} request(s), {point['traffic']}"
                found.append(_verdict(bar, where, figures[ratio], least, figures[f"rounds_{ratio}"]))
    for start in starts:
        for when in WHEN:
            load = start["requests"] if when == "start" else f"{start['requests']} to {start['then']}"
            where = f"first seconds after a {when}: {load} request(s)"
            window = start[when]
            found.append(
                _verdict("adaptive to plain", where, window["ratio"], PLAIN_LEAST, window["rounds_ratio"])
            )
    return found


def _bars(traffic: str) -> list[tuple[str, str, str, float]]:
    """Return (bar, side, name of the ratio, minimum) of each bar."""
    to_plain = ("adaptive to plain", ADAPTIVE, "ratio_to_plain", PLAIN_LEAST)
    if traffic == "mixed":
        return [("adaptive to the best", ADAPTIVE, "ratio_to_best", MIXED_LEAST), to_plain]
    return [
        ("adaptive to the best", ADAPTIVE, "ratio_to_best", BEST_LEAST),
        to_plain,
        ("random drafter to plain", RANDOM, "ratio_to_plain", RANDOM_LEAST),
    ]


def _verdict(bar: str, where: str, measured: float, least: float, rounds: Sequence[float]) -> Figures:
    spread = [min(rounds), max(rounds)]
    return {
        "bar": bar,
        "where": where,
        "least": least,
        "measured": measured,
        "range": spread,
        "met": measured >= least,
    }


def _speeds(passes: Sequence[LoadPass]) -> list[float]:
    return [done.user_tokens_per_s for done in passes]


def _ratios(ours: Sequence[LoadPass], theirs: Sequence[LoadPass]) -> list[float]:
    return [mine / other for mine, other in zip(_speeds(ours), _speeds(theirs), strict=True)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
