"""A batch job's progress: rates, remaining time, messages, gauges; and the measured speed-up."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from urllib.error import URLError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.batch.engine_meter import EngineMeter
from manta.actors.batch.row_stats import EngineTotals, RowStats
from manta.cluster.batch.baseline_sample import BaselineSample, num_plain_rows
from manta.cluster.engine.engine_core import EngineStats
from manta.cluster.errors import ConfigError
from manta.cluster.metrics.fleet_metrics import BATCH_CATALOGUE
from manta.jobs.batch import progress
from manta.jobs.batch.progress import JobGauges, Progress, ProgressMeter, ProgressView
from manta.jobs.common.progress import format_duration
from rich.console import Console

SEATS = 8


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedEngine:
    """An engine that runs up to SEATS rows at once, one tick at a time."""

    def __init__(
        self, sample: BaselineSample, rates: Callable[[int], tuple[float, float]], surplus: int
    ) -> None:
        self.sample = sample
        self.rates = rates  # tokens per tick and row, plain and speculated, by the rows that were started
        self.surplus = surplus
        self.now_s, self.tokens, self.started = 0.0, 0.0, 0
        self.plain: list[int] = []  # numbers of rows that were answered plainly
        self.running: list[list[float]] = []  # tokens left, speculated

    def run(self, lengths: list[int]) -> None:
        waiting = list(lengths)
        while waiting or self.running:
            while waiting and len(self.running) < SEATS + self.surplus:
                speculate = self.sample.start(self.now_s, round(self.tokens))
                if not speculate:
                    self.plain.append(self.started)
                self.running.append([waiting.pop(0), speculate])
                self.started += 1
            self._tick()

    def _tick(self) -> None:
        self.now_s += 1
        for row in self.running[:SEATS]:  # those beyond wait in the engine
            came = self.rates(self.started)[bool(row[1])]
            row[0] -= came
            self.tokens += came  # the last tick counts as a whole one, so that rates are exact
        for row in [row for row in self.running if row[0] <= 0]:
            self.running.remove(row)
            self.sample.end(self.now_s, round(self.tokens), bool(row[1]))


@settings(max_examples=40)
@given(
    plain=st.floats(1, 8),
    speedup=st.floats(0.4, 6),
    surplus=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_the_plain_sample_measures_any_speedup(plain: float, speedup: float, surplus: int, seed: int) -> None:
    sample = BaselineSample(2 * SEATS, SEATS)
    engine = SimulatedEngine(sample, lambda _: (plain, plain * speedup), surplus)
    lengths = random.Random(seed).choices(range(60, 100), k=30 * SEATS)
    engine.run(lengths)
    found = sample.comparison
    assert found is not None
    assert found.speedup == pytest.approx(speedup, rel=0.02)
    assert found.plain_tokens_per_s == pytest.approx(SEATS * plain, rel=0.02)
    first = engine.plain[0]
    assert engine.plain == list(range(first, first + len(engine.plain))), "one window"
    assert SEATS < len(engine.plain) <= 4 * SEATS
    assert first >= 2 * SEATS, "after as many speculated rows"


def test_slow_drift_over_the_job_cancels_out_of_the_comparison() -> None:
    sample = BaselineSample(2 * SEATS, SEATS)
    # Rows become faster and faster, plain ones and speculated ones: either side alone would be 20 % off.
    engine = SimulatedEngine(sample, lambda n: (2 + n / 40, 4 + n / 20), 2)
    engine.run([80] * 40 * SEATS)
    assert sample.comparison is not None
    assert sample.comparison.speedup == pytest.approx(2, rel=0.05)


def test_mixed_and_half_empty_time_is_not_counted() -> None:
    sample = BaselineSample(2, full=2)

    def both(now_s: float, tokens: int) -> None:
        sample.end(now_s, tokens, True)
        assert sample.start(now_s, tokens)

    assert sample.start(0, 0)
    assert sample.start(10, 1000)  # alone until here: not full
    both(20, 1100)  # 10 a second
    sample.end(30, 1200, True)
    assert not sample.start(31, 1500)  # alone for a second; the first plain row
    sample.end(40, 9000, True)  # mixed until here
    assert not sample.start(40, 9000)
    sample.end(50, 9040, False)  # 4 a second
    assert sample.comparison is None
    assert sample.start(50, 9040)
    sample.end(60, 20000, False)  # mixed
    assert sample.start(60, 20000)
    sample.end(64, 20080, True)  # 20 a second
    assert sample.comparison is None, "4 s after the plain rows are less than their 10"
    assert sample.start(64, 20080)
    sample.end(72, 20240, True)
    found = sample.comparison
    assert found is not None
    assert (found.plain_tokens, found.plain_s) == (40, 10)
    assert (found.drafted_tokens, found.drafted_s) == (100 + 200, 20), "10 s before, the first 10 s after"
    assert found.speedup == pytest.approx(15 / 4)


@pytest.mark.parametrize(
    "lengths",
    [
        [90] * SEATS * 3,  # too few rows
        [50] * 3,
        [20] * SEATS * 2 + [4000] + [20] * SEATS * 40,  # plain rows never run alone
    ],
)
def test_an_unfinished_sample_gives_no_result(lengths: list[int]) -> None:
    sample = BaselineSample(2 * SEATS, SEATS)
    SimulatedEngine(sample, lambda _: (2.0, 6.0), 2).run(lengths)
    assert sample.comparison is None


def test_a_sample_without_duration_gives_no_result() -> None:
    sample = BaselineSample(2, full=1)
    now_s, num_plain = 0.0, 0
    for row in range(100):
        speculate = sample.start(now_s, row * 10)
        num_plain += not speculate
        now_s += 0.25 if speculate else 0.2
        sample.end(now_s, row * 10 + 10, speculate)
    assert num_plain == 4, "twice as many as are to be, to no avail"
    assert sample.comparison is None


def test_there_is_no_sample_without_rows_for_it() -> None:
    sample = BaselineSample(0, SEATS)
    engine = SimulatedEngine(sample, lambda _: (2.0, 6.0), 2)
    engine.run([50] * 200)
    assert not engine.plain and sample.comparison is None
    assert num_plain_rows(2_560, 64) == 128
    assert num_plain_rows(2_559, 64) == 0, "more than 5 % of the rows"
    assert num_plain_rows(100, 8, requested=20) == 20
    assert num_plain_rows(10_000, 64, requested=0) == 0
    with pytest.raises(ConfigError, match=r"plain_sample=15 .*Set it to 16 or more") as caught:
        num_plain_rows(100, 8, requested=15)
    assert caught.value.param == "plain_sample"


def stats(tokens: int) -> EngineStats:
    return EngineStats(0, 0, 0, 0, 0.0, 1, 7, tokens, 0, 0, 0, {}, 3, 9, 4, (2, 2), {})


def test_an_engines_time_is_in_its_results_exactly_once() -> None:
    clock, tokens = Clock(), [0]
    meter = EngineMeter(lambda: stats(tokens[0]), "GPU", 4, clock.now_s, BaselineSample(4, full=1), clock)
    clock.now_s += 10  # loading
    results: list[dict[str, dict[str, float]]] = []
    for _ in range(8):
        speculate = meter.row_started()
        clock.now_s += 2
        tokens[0] += 60 if speculate else 20
        results.append({})
        meter.row_ended(results[-1], speculate)
        clock.now_s += 1  # nothing runs
    meter.row_started()
    clock.now_s += 5
    meter.row_ended(None, True)  # given up: its time is attributed when a row ends
    figures = meter.totals()
    spent = {
        name: sum(result["engine_spent"][name] for result in results) for name in results[0]["engine_spent"]
    }
    assert spent["device_s"] == 4 * (10 + 8 * 3 - 1)
    assert figures.device_s == 4 * (10 + 8 * 3 + 5)
    assert (spent["open_s"], spent["busy_s"]) == (4 * (8 * 3 - 1), 4 * 8 * 2)
    assert figures.rows_done == 8 and figures.rows_running == 0
    assert (figures.num_steps, figures.num_accepted_tokens, figures.prompt_tokens) == (3, 4, 7)
    assert figures.completion_tokens == 6 * 60 + 2 * 20
    assert figures.comparison is not None and figures.comparison.speedup == pytest.approx(3)
    assert (spent["plain_tokens"], spent["plain_s"]) == (40, 4)
    assert [bool(result["engine_spent"]["plain_s"]) for result in results].count(True) == 1


def test_figures_of_several_engines_add_up() -> None:
    one = EngineTotals(rows_done=2, busy_s=3, first_row_s=50, last_row_s=60, num_devices=1, device="GPU")
    two = EngineTotals(rows_done=5, busy_s=4, first_row_s=40, last_row_s=55, num_devices=1)
    both = one.merge(two)
    assert (both.rows_done, both.busy_s, both.num_devices) == (7, 7, 2)
    assert (both.first_row_s, both.last_row_s, both.device) == (40, 60, "GPU")
    assert one.merge(EngineTotals()) == one == EngineTotals().merge(one)


def durable(rows: int, tokens_out: int) -> RowStats:
    return RowStats(rows=rows, prompt_tokens=10 * rows, completion_tokens=tokens_out)


def test_rates_and_remaining_time_follow_the_tokens() -> None:
    clock = Clock()
    pace = ProgressMeter(300, clock=clock)
    now = pace.update(durable(100, 1000), EngineTotals(), 2)  # of an earlier run
    assert (now.rows, now.answering, now.left_s, now.mean_tokens_per_s) == (100, False, None, 0)
    clock.now_s += 100  # loading: no part of any rate
    pace.update(durable(100, 1000), EngineTotals(rows_running=10), 2)
    for second in range(1, 41):
        clock.now_s += 1
        done = second // 2 * 10
        live = EngineTotals(rows_done=done, rows_running=10, completion_tokens=50 * second, prompt_tokens=9)
        now = pace.update(durable(100 + done, 1000 + 10 * done), live, 2)
        if second == 1:
            assert now.left_s is None, "no row of this run is done"
    assert now.rows == 300 and now.left_s == 0
    assert now.completion_tokens == 1000 + 2000 and now.prompt_tokens == 10 * 300
    assert now.tokens_per_s == pytest.approx(50) and now.mean_tokens_per_s == pytest.approx(50)


def test_the_remaining_time_counts_tokens_of_running_rows() -> None:
    clock = Clock()
    pace = ProgressMeter(100, clock=clock)
    pace.update(durable(0, 0), EngineTotals(rows_running=4), 1)
    clock.now_s += 10
    live = EngineTotals(rows_done=20, rows_running=4, completion_tokens=240)
    now = pace.update(durable(10, 100), live, 1)  # of 20 done rows 10 are durable
    # 80 rows of 10 tokens are left, of which 240 - 100 - 10 x 10 = 40 tokens are there; 24 a second come.
    assert now.left_s == pytest.approx((800 - 40) / 24) and now.rows == 20


def test_the_current_rate_forgets_the_past_and_survives_a_lost_engine() -> None:
    clock, tokens = Clock(), 0
    pace = ProgressMeter(1000, left=500, clock=clock)
    for _ in range(100):
        clock.now_s += 1
        tokens += 10
        pace.update(durable(700, 0), EngineTotals(rows_running=4, completion_tokens=tokens), 1)
    for _ in range(12):
        clock.now_s += 1
        tokens += 200
        now = pace.update(durable(700, 0), EngineTotals(rows_running=4, completion_tokens=tokens), 1)
    assert now.tokens_per_s == pytest.approx(200) and now.mean_tokens_per_s < 40
    assert now.rows == 500, "failed rows are answered again: what is left counts"
    clock.now_s += 1
    now = pace.update(durable(700, 0), EngineTotals(rows_running=2, completion_tokens=tokens // 2), 1)
    assert now.tokens_per_s == 0 and now.left_s is None
    clock.now_s += 1
    live = EngineTotals(rows_running=2, completion_tokens=tokens // 2 + 30)
    assert pace.update(durable(700, 0), live, 1).tokens_per_s == pytest.approx(30)


def test_times_are_printed_in_two_units() -> None:
    spelled = [format_duration(s) for s in (0, 59.6, 61, 3600, 7260, 90000)]
    assert spelled == ["0 s", "1 min", "1 min 1 s", "1 h", "2 h 1 min", "1 d 1 h"]


def test_without_a_terminal_a_line_is_printed_occasionally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressView() as view:
        view.begin(10)
        view.update(RowStats(), EngineTotals(), 2)
        view.update(durable(1, 30), EngineTotals(rows_done=1), 2)  # the first one is news
        view.update(durable(2, 60), EngineTotals(rows_done=2), 2)  # within the interval
        monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
        time.sleep(0.01)
        live = EngineTotals(
            rows_done=5, rows_running=4, completion_tokens=150, num_steps=10, num_accepted_tokens=25
        )
        figures = durable(5, 150)
        figures.failed = 1
        view.update(figures, live, 2)
        view.update(RowStats(rows=5, plain_tokens=10, plain_s=1, drafted_tokens=25, drafted_s=1), live, 1)
    start, first, half, measured = capsys.readouterr().err.splitlines()
    assert start == "10 rows; loading the models"
    assert first.startswith("1/10 rows (10 %); 0 failed; 10 tokens in, 30 out; ")
    assert re.fullmatch(
        r"5/10 rows \(50 %\); 1 failed; 50 tokens in, 150 out; \d+ tokens/s now, \d+ on average; "
        r"3\.50 tokens per step; speed-up not measured yet; 2 engines; about \d.* left",
        half,
    )
    assert "2.50 x plain decoding; 1 engine" in measured


def test_a_terminal_gets_a_bar_and_permanent_lines() -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=100, legacy_windows=False)
    with ProgressView(console) as view:
        view.begin(10, compares=False)
        view.say("waiting for [2 CPU]")
        view.update(RowStats())
        view.update(durable(4, 60), EngineTotals(rows_done=4, completion_tokens=60), 1)
        view._live.refresh()
    text = shown.getvalue()
    assert "waiting for [2 CPU]" in text and "4/10" in text and "40 tokens in, 60 out" in text
    assert "speed-up" not in text, "a job that measures nothing does not promise to"


@pytest.mark.usefixtures("ray_session")
def test_ray_shows_the_progress_of_a_job() -> None:
    import ray

    metrics_of_ray = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    now = Progress(3, 10, 1, 50, 60, 7.5, 7.0, 12.0, 2.5, 3.25, 2, True)
    gauges = JobGauges("answers")
    found: dict[str, float] = {}
    deadline_s = time.monotonic() + 60
    while len(found) < len(BATCH_CATALOGUE) and time.monotonic() < deadline_s:
        gauges.show(now)  # again and again, as a job does: Ray loses values from before its agent's start
        time.sleep(0.2)
        lines: list[str] = []
        with suppress(URLError), urllib.request.urlopen(metrics_of_ray, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = {
            match[1]: float(match[2])
            for line in lines
            if (match := re.match(r'ray_(manta_batch_\w+)\{.*job="answers".*\} (\S+)', line))
        }
    assert set(found) == {metric.name for metric in BATCH_CATALOGUE}
    assert found["manta_batch_rows_done"] == 3 and found["manta_batch_rows"] == 10
    assert found["manta_batch_speedup"] == 3.25 and found["manta_batch_seconds_left"] == 12
