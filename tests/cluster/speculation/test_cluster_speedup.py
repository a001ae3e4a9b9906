"""The speed-up that an engine reports, compared with the true one in a simulator."""

from __future__ import annotations

import pytest
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.engine.speedup_meter import MEMORY_S, SpeedupMeter
from manta.cluster.simulation.simulated_executor import LinearCost
from support.engines.cluster_checker import make_info, simulated_engine

FACTS = {"num_pages": (8192,), "page_size": 16, "max_model_len": 2048, "eos_token_ids": ()}
COST = LinearCost(verify_floor_s=4e-3, verify_row_s=2e-4, draft_floor_s=1e-3, draft_row_s=2e-5)


def served(num_requests: int, survival: tuple[float, ...], *, speculate: bool) -> tuple[float, EngineStats]:
    """Tokens per second until the first of a number of requests ends, and the engine's stats then.

    Requests are longer with accepted drafts, so that the first steps, which have no comparison, count
    little."""
    info = make_info(**FACTS, num_speculative_tokens=len(survival) if speculate else 0)
    spec = {"model": "d"} if speculate else None
    engine = simulated_engine(info, survival, COST, max_num_batched_tokens=512, speculative_config=spec)
    for i in range(num_requests):
        engine.add(f"r{i}", max_tokens=1200 if len(survival) > 2 else 500, ignore_eos=True)
    while not engine.scheduler.counters.finished:
        engine.step()
    stats = engine.stats()
    return stats.generation_tokens / engine.clock(), stats


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_requests", [1, 4, 24])
@pytest.mark.parametrize("survival", [(0.85, 0.7, 0.55, 0.4, 0.3), (0.05, 0.0)], ids=["good", "hopeless"])
def test_the_reported_speed_up_is_the_true_one(num_requests: int, survival: tuple[float, ...]) -> None:
    plain, _ = served(num_requests, survival, speculate=False)
    taken, stats = served(num_requests, survival, speculate=True)
    assert SpeedupMeter().ratio(stats) == pytest.approx(taken / plain, rel=0.06)
    assert (taken / plain > 1.5) == (len(survival) == 5 and num_requests < 24), "both are seen"
    executed_s = stats.step_seconds["execute"]
    assert stats.speculating_s > 0.4 * executed_s, "of short steps every other one, of others nearly all"


def test_the_speed_up_covers_the_last_minute_of_decoding() -> None:
    def stats(plain_s: float, speculating_s: float) -> EngineStats:
        return EngineStats(plain_s=plain_s, speculating_s=speculating_s)

    meter = SpeedupMeter()
    assert SpeedupMeter().logged_ratio(stats(20.0, 10.0)) is None, "a few answers are no measurement"
    assert SpeedupMeter().logged_ratio(stats(60.0, 30.0)) == pytest.approx(2.0)
    assert meter.ratio(stats(0.0, 0.0)) is None, "nothing is measured"
    assert meter.ratio(stats(20.0, 10.0)) == pytest.approx(2.0)
    assert meter.ratio(stats(20.0, 10.0)) == pytest.approx(2.0), "an idle engine keeps its last word"
    assert 0.5 < (meter.ratio(stats(25.0, 20.0)) or 0.0) < 2.0
    assert meter.ratio(stats(25.0 + MEMORY_S / 2, 20.0 + MEMORY_S)) == pytest.approx(0.5), (
        "the past is forgotten"
    )
