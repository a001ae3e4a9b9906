"""Simulated fleets: a replica against a real engine, conservation of requests, a day under both policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cli import main
from benchmarks.options import FleetOptions
from benchmarks.simulate.fleet import OurPolicy, percentiles, run_fleet
from benchmarks.simulate.replica import ReplicaModel
from benchmarks.simulate.replicas import Arrivals, Fleet, FleetReport
from benchmarks.simulate.traffic import Day, make_day, read_arrivals
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import DatasetError
from manta.cluster.fleet.autoscaling import FleetLoad, ReplicaStats, ScalingRules
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor, VirtualClock
from manta.cluster.speculation.acceptance_length import geometric_survival
from manta.cluster.step.executor import ExecutorInfo

COST = LinearCost(0.02, 0.0001, 0.002)
SURVIVAL = geometric_survival(0.7, 7)
SLOTS = 8
MODEL = ReplicaModel.of(COST, SURVIVAL, SLOTS, kv_tokens=100_000, start_s=30.0)


class Fixed:
    """Keeps a fixed number of replicas from a given time on."""

    def __init__(self, *numbers: tuple[float, int]) -> None:
        self._numbers = numbers

    def wanted(self, fleet: Fleet, now_s: float) -> int:
        return [number for from_s, number in self._numbers if from_s <= now_s][-1]


def arrivals(rate_per_s: float, seconds: float, seed: int = 1) -> Arrivals:
    rng = np.random.default_rng(seed)
    at_s = np.sort(rng.uniform(0.0, seconds, round(rate_per_s * seconds)))
    return Arrivals(at_s, rng.integers(16, 200, len(at_s)), rng.integers(50, 400, len(at_s)))


def through_an_engine(coming: Arrivals) -> tuple[float, float]:
    """Return the mean time to the first token and the end of all, by a real scheduler."""
    clock = VirtualClock()
    info = ExecutorInfo((10_000,), 16, 2048, 1000, (), len(SURVIVAL), "float32", "cpu")
    executor = SimulatedExecutor(info, SURVIVAL, COST, clock.advance)
    config = EngineConfig(model="m", max_num_seqs=SLOTS, speculative_config=SpeculativeConfig(model="d"))
    engine = EngineCore(config, executor, clock)
    firsts: dict[str, float] = {}
    ahead = list(range(len(coming.arrival_s)))
    while ahead or engine.has_unfinished:
        if not engine.has_unfinished:
            clock.now_s = max(clock.now_s, float(coming.arrival_s[ahead[0]]))
        while ahead and coming.arrival_s[ahead[0]] <= clock.now_s:
            i = ahead.pop(0)
            params = SamplingParams(max_tokens=int(coming.output_tokens[i]), ignore_eos=True, seed=i)
            prompt = tuple(int(t) for t in np.random.default_rng(i).integers(0, 999, coming.prompt_tokens[i]))
            engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        for update in engine.step():
            firsts.setdefault(update.request_id, clock.now_s)
    waits = [firsts[str(i)] - at_s for i, at_s in enumerate(coming.arrival_s)]
    return float(np.mean(waits)), clock.now_s


@pytest.mark.parametrize("rate_per_s", [1.0, 3.0])
def test_a_coarse_replica_is_as_fast_as_an_engine(rate_per_s: float) -> None:
    coming = arrivals(rate_per_s, 30.0)
    report = Fleet(MODEL, coming, Fixed((0.0, 1)), start=1).run()
    ttft_s, end_s = through_an_engine(coming)
    ours_s = float(np.nanmax(coming.arrival_s + report.ttft_s + report.tpot_s * (coming.output_tokens - 1)))
    assert not report.failed
    assert ours_s == pytest.approx(end_s, rel=0.1)
    assert float(report.ttft_s.mean()) == pytest.approx(ttft_s, rel=0.35, abs=0.03)


def check(report: FleetReport, coming: Arrivals) -> None:
    """Assert that every request is answered or refused, and none faster than possible."""
    answered = ~np.isnan(report.ttft_s)
    assert answered.sum() + report.failed == len(coming.arrival_s)
    assert (answered == ~np.isnan(report.tpot_s)).all()
    assert (report.ttft_s[answered] >= MODEL.step_s[0] - 1e-9).all()
    fastest_s = min(s / t for s, t in zip(MODEL.step_s, MODEL.step_tokens, strict=True))
    assert (report.tpot_s[answered] >= 0.0).all() and np.median(report.tpot_s[answered]) >= 0.7 * fastest_s


def test_replicas_are_paid_from_their_request_until_their_last_answer() -> None:
    coming = Arrivals(np.array([0.0, 50.0, 200.0]), np.array([1, 1, 1]), np.array([4000, 4000, 1]))
    one = Fleet(MODEL, coming, Fixed((0.0, 1)), start=1).run()
    assert one.replica_s == pytest.approx(200.0)
    two = Fleet(MODEL, coming, Fixed((0.0, 1), (10.0, 2), (60.0, 1)), start=1).run()
    lasts_s = 4000 * MODEL.step_s[0] / MODEL.step_tokens[0]  # the second one's request, if it got one
    assert two.replica_s == pytest.approx(200.0 + 50.0, abs=0.1) or two.replica_s == pytest.approx(
        200.0 + 40.0 + lasts_s, abs=3.0
    )
    check(two, coming)


def test_requests_wait_for_the_first_replica_and_excess_ones_are_refused() -> None:
    coming = Arrivals(np.linspace(1.0, 5.0, 40), np.full(40, 10), np.full(40, 10))
    report = Fleet(MODEL, coming, OurPolicy(ScalingRules(), 0, 4), start=0).run()
    assert report.failed == 8, "Serve queues four times what a replica runs"
    late = Arrivals(np.append(coming.arrival_s[:4], 60.0), np.full(5, 10), np.full(5, 10))
    waited = Fleet(MODEL, late, OurPolicy(ScalingRules(), 0, 4), start=0).run()
    assert waited.failed == 0 and 25.0 < waited.ttft_s[0] < 35.0 and waited.ttft_s[4] < 1.0
    check(waited, late)


def test_every_request_is_answered_or_refused_while_replicas_come_and_go() -> None:
    coming = arrivals(6.0, 300.0)
    numbers = [(20.0 * i, n) for i, n in enumerate((1, 4, 2, 5, 1, 3, 0, 2, 2, 1, 4, 1, 1, 1, 1))]
    check(Fleet(MODEL, coming, Fixed(*numbers), start=1).run(), coming)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_fleets_load_is_the_sum_of_its_replicas_and_no_slot_is_lost(seed: int) -> None:
    """The limits of slots, queues and pages hold while many requests pass through few replicas."""
    coming, looks = arrivals(30.0, 60.0, seed), list[float]()
    model = replace(MODEL, kv_tokens=2500)

    class Looking(Fixed):
        def wanted(self, fleet: Fleet, now_s: float) -> int:
            slots = fleet._slots
            assert (slots.count <= SLOTS).all() and (slots.load <= SLOTS + model.max_waiting).all()
            assert (slots.kv_tokens <= model.kv_tokens).all() and (slots.kv_tokens >= 0).all()
            assert (np.isfinite(slots._ends_NC).sum(axis=1) == slots.count).all()
            rows = fleet._serving
            mean_tokens = slots.tokens / np.maximum(slots.finished, 1)
            figures = [
                ReplicaStats(
                    running=float(slots.count[row]),
                    waiting=float(slots.waiting[row]),
                    max_num_seqs=SLOTS,
                    kv_usage=float(slots.kv_tokens[row]) / model.kv_tokens,
                    waiting_tokens=float(slots.waiting[row] * mean_tokens[row]),
                    decode_tokens_per_s=float(slots.count[row] * slots.pace()[row]),
                )
                for row in rows.tolist()
            ]
            wanted = FleetLoad.of(figures, fleet.there, float(len(fleet.queue)))
            found = fleet.load()
            assert (found.busy, found.backlog_s) == pytest.approx((wanted.busy, wanted.backlog_s))
            assert (found.there, found.num_reporting, found.queued) == (
                wanted.there,
                wanted.num_reporting,
                wanted.queued,
            )
            looks.append(found.busy)
            return super().wanted(fleet, now_s)

    report = Fleet(model, coming, Looking((0.0, 3), (20.0, 5), (30.0, 2)), start=3).run()
    check(report, coming)
    assert max(looks) > 2.0 and report.failed > 0, "it was crowded"


def test_requests_begin_and_end_at_their_own_times_within_a_time_step() -> None:
    """The times are computed by hand: the prompt of the second of two requests delays the first."""
    model = ReplicaModel(
        step_s=(0.1, 0.2),
        step_tokens=(1.0, 1.0),
        prompt_token_s=0.01,
        kv_tokens=10_000,
        max_waiting=2,
        start_s=1.0,
    )
    coming = Arrivals(np.array([0.1, 2.0, 2.1]), np.array([10, 100, 10]), np.array([40, 20, 5]))
    report = Fleet(model, coming, Fixed((0.0, 1)), start=1).run()
    # 0.1 + 0.1 of its prompt: 18 tokens until 2.0; a second for the other's prompt; then 5 a second each.
    assert report.ttft_s[0] == pytest.approx(0.1 + 0.1) and report.ttft_s[1] == pytest.approx(1.0 + 0.2)
    second_ends_s = 3.0 + 20 * 0.2
    first_ends_s = second_ends_s + (40 - 18 - 20) * 0.2 + 0.1
    ends_s = coming.arrival_s + report.ttft_s + report.tpot_s * (coming.output_tokens - 1)
    assert ends_s[1] == pytest.approx(second_ends_s, abs=1e-6)
    assert report.ttft_s[2] == pytest.approx(second_ends_s + 0.1 + 0.2 - 2.1, abs=1e-6), "it had to wait"
    assert ends_s[0] == pytest.approx(first_ends_s, abs=0.06)


OPTIONS = FleetOptions(
    peak_per_s=6.0,
    hours=3.0,
    bursts=40,
    output_tokens=600.0,
    seed=3,
    replicas=(1, 30),
    target_ongoing_requests=(2.0, 9.0),
)


@pytest.mark.slow
def test_a_simulated_day_is_reproducible_and_mantas_policy_takes_fewer_replica_hours() -> None:
    first, again = run_fleet(OPTIONS), run_fleet(replace(OPTIONS, ray=False))
    for figures in (first, again):
        for point in figures["policies"]:
            del point["computed_in_s"]
    assert again["policies"] == first["policies"][:1] and again["saved"]["than_the_default"] is None
    ours, default, _ = first["policies"]
    assert ours["replica_hours"] < 0.6 * default["replica_hours"]
    assert ours["ttft_s"]["p95"] < 2 * default["ttft_s"]["p95"]
    assert first["saved"]["than_the_default"]["replica_hours"] > 0.4


def test_refused_requests_count_as_infinite_waits() -> None:
    waits = np.array([0.1] * 96 + [np.nan] * 4)
    assert percentiles(waits) == {"p50": 0.1, "p95": 0.1, "p99": None}


def test_a_synthetic_day_has_its_minimum_peak_and_requested_lengths() -> None:
    day = make_day(Day(peak_per_s=2.0, bursts=0))
    per_hour = np.histogram(day.arrival_s, bins=24, range=(0.0, 86_400.0))[0]
    assert per_hour[0] < 0.25 * per_hour[12] and per_hour[12] == pytest.approx(7200, rel=0.1)
    assert day.output_tokens.mean() == pytest.approx(2500, rel=0.02)
    assert (np.diff(day.arrival_s) >= 0).all()


def test_a_trace_is_replayed_and_a_bad_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 3.0 - i, "prompt_tokens": 10, "output_tokens": 20} for i in range(3)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_arrivals(trace).arrival_s.tolist() == [1.0, 2.0, 3.0]
    output = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["simulate-fleet", "--trace", str(trace), "--target-ongoing-requests", "2", "-o", str(output)])
    assert ended.value.code == 0 and "fewer replica-hours than the default" in capsys.readouterr().out
    assert json.loads(output.read_text())["requests"] == 3
    trace.write_text('{"arrival_s": 1.0, "prompt_tokens": 0, "output_tokens": 20}')
    with pytest.raises(DatasetError, match="jsonl:1: prompt_tokens"):
        read_arrivals(trace)
    with pytest.raises(DatasetError, match="cannot be read"):
        read_arrivals(tmp_path / "none")
    with pytest.raises(SystemExit) as ended:
        main(["simulate-fleet", "--scaling", '{"load_hi": 1}'])
    assert "load_high" in str(ended.value.code)
