"""Measures the first seconds of fresh engines at one load, and then at another: adaptive against plain.

In these seconds an adaptive engine has few measurements, and its trials cost something that a steady point
does not show. Each load of the sweep is the first load of one pair of engines; the second load is far from
it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....actors.engine.uniproc_executor import make_executor
from ....cluster.config import EngineConfig
from ..common.engine_passes import Figures, say
from ..common.idle_check import Watch
from ..common.interleaving import rotated
from ..load.request_source import RequestSource
from .engine_driver import Driver
from .engines import ADAPTIVE, PLAIN
from .load_records import LoadPass

WHEN = ("start", "change")


def measure_starts(
    config: EngineConfig,
    loads: Sequence[int],
    firsts: Sequence[int],
    source: RequestSource,
    window_s: float,
    rounds: int,
) -> Iterator[Figures]:
    """Yield for each first load the tokens/s, and their ratio, after a start and after a change of load."""
    for first in firsts:
        i = loads.index(first)
        second = loads[(i + (len(loads) + 1) // 2) % len(loads)]
        watch = Watch()
        passes: dict[str, list[list[LoadPass]]] = {PLAIN: [], ADAPTIVE: []}
        for number in range(rounds):
            say(f"a start with {first} request(s), then {second}, round {number + 1}/{rounds}")
            for name in rotated(list(passes), number + i):
                with watch.open():
                    passes[name].append(_hold(config, name, source, (first, second), window_s))
        yield {"requests": first, "then": second, **_figures(passes), "idleness": watch.found.as_json()}


def _hold(
    config: EngineConfig, name: str, source: RequestSource, loads: tuple[int, int], window_s: float
) -> list[LoadPass]:
    spec = config.speculative_config
    assert spec is not None, "run_sweep checks that there is a speculative config"
    of_side = replace(config, speculative_config=replace(spec, adaptive=True) if name == ADAPTIVE else None)
    driver = Driver(of_side, make_executor(of_side))
    try:
        return driver.hold(source, loads, window_s)
    finally:
        driver.close()


def _figures(passes: Mapping[str, list[list[LoadPass]]]) -> Figures:
    figures: Figures = {}
    for place, when in enumerate(WHEN):
        speeds = {name: [done[place].tokens_per_s for done in found] for name, found in passes.items()}
        pairs = zip(speeds[ADAPTIVE], speeds[PLAIN], strict=True)
        ratios = [adaptive / max(plain, 1e-9) for adaptive, plain in pairs]
        figures[when] = {
            **{name: round(statistics.median(found), 2) for name, found in speeds.items()},
            "ratio": round(statistics.median(ratios), 4),
            "rounds_ratio": [round(ratio, 4) for ratio in ratios],
        }
    return figures
