"""A batch job's progress: rates, remaining time, messages, gauges."""

from __future__ import annotations

import re
import time
import urllib.request
from contextlib import suppress
from functools import partial
from io import StringIO
from types import SimpleNamespace
from urllib.error import URLError

import pytest
from manta.actors.batch.engine_meter import EngineMeter
from manta.actors.batch.row_stats import EngineTotals, RowStats
from manta.cluster.engine.engine_stats import EngineStats
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


def stats(tokens: int) -> EngineStats:
    return EngineStats(
        steps=1,
        prompt_tokens=7,
        generation_tokens=tokens,
        num_drafts=3,
        num_draft_tokens=9,
        num_accepted_tokens=4,
        accepted_per_pos=(2, 2),
    )


def test_an_engines_time_is_in_its_results_exactly_once() -> None:
    clock, tokens = Clock(), [0]
    meter = EngineMeter(lambda: stats(tokens[0]), "GPU", 4, clock.now_s, clock)
    clock.now_s += 10  # loading
    results: list[dict[str, dict[str, float]]] = []
    for _ in range(8):
        meter.row_started()
        clock.now_s += 2
        tokens[0] += 60
        results.append({})
        meter.row_ended(results[-1])
        clock.now_s += 1  # nothing runs
    meter.row_started()
    clock.now_s += 5
    meter.row_ended(None)  # given up: its time is attributed when a row ends
    figures = meter.totals()
    spent = {
        name: sum(result["engine_spent"][name] for result in results) for name in results[0]["engine_spent"]
    }
    assert spent["device_s"] == 4 * (10 + 8 * 3 - 1)
    assert figures.device_s == 4 * (10 + 8 * 3 + 5)
    assert (spent["open_s"], spent["busy_s"]) == (4 * (8 * 3 - 1), 4 * 8 * 2)
    assert figures.rows_done == 8 and figures.rows_running == 0
    assert (figures.num_steps, figures.num_accepted_tokens, figures.prompt_tokens) == (3, 4, 7)
    assert figures.completion_tokens == 8 * 60


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
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(progress, "ProgressMeter", partial(ProgressMeter, clock=clock))
    with ProgressView() as view:
        view.begin(10)
        view.update(RowStats(), EngineTotals(), 2)
        clock.now_s += 1
        view.update(durable(1, 30), EngineTotals(rows_done=1), 2)  # the first one is news
        view.update(durable(2, 60), EngineTotals(rows_done=2), 2)  # within the interval
        clock.now_s += progress.PLAIN_INTERVAL_S
        live = EngineTotals(
            rows_done=5, rows_running=4, completion_tokens=150, num_steps=10, num_accepted_tokens=25
        )
        figures = durable(5, 150)
        figures.failed = 1
        view.update(figures, live, 2)
    start, first, half = capsys.readouterr().err.splitlines()
    assert start == "10 rows; loading the models"
    assert first.startswith("1/10 rows (10 %); 0 failed; 10 tokens in, 30 out; ")
    assert re.fullmatch(
        r"5/10 rows \(50 %\); 1 failed; 50 tokens in, 150 out; \d+ tokens/s now, \d+ on average; "
        r"3\.50 tokens per step; 2 engines; about \d.* left",
        half,
    )


def test_a_terminal_gets_a_bar_and_permanent_lines() -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=100, legacy_windows=False)
    with ProgressView(console) as view:
        view.begin(10)
        view.say("waiting for [2 CPU]")
        view.update(RowStats())
        view.update(durable(4, 60), EngineTotals(rows_done=4, completion_tokens=60), 1)
        view._live.refresh()
    text = shown.getvalue()
    assert "waiting for [2 CPU]" in text and "4/10" in text and "40 tokens in, 60 out" in text


@pytest.mark.usefixtures("ray_session")
def test_ray_shows_the_progress_of_a_job() -> None:
    import ray

    metrics_of_ray = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    now = Progress(3, 10, 1, 50, 60, 7.5, 7.0, 12.0, 2.5, 2, True)
    gauges = JobGauges("answers")
    found: dict[str, float] = {}
    deadline_s = time.monotonic() + 240
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
    assert found["manta_batch_mean_accepted_length"] == 2.5 and found["manta_batch_seconds_left"] == 12
