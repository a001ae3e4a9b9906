"""Progress of a batch job while it runs: rates and time left, on a terminal, in a log, and in Ray's metrics.

`ProgressMeter` computes a `Progress`. `ProgressView` shows it as a bar on a terminal, else as a line now and
then on standard error, which `ray job logs` and Ray's dashboard show. `JobGauges` exports it as
`ray_manta_batch_...`. The report at the end is `report.py`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ray.util.metrics import Gauge
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from ...actors.batch.row_stats import EngineTotals, RowStats
from ...cluster.metrics.fleet_metrics import BATCH_CATALOGUE
from ..common.progress import format_duration
from ..common.tables import decimals

PLAIN_INTERVAL_S = 10.0  # between two lines of a log
NOW_S = 10.0  # window of the current rate
LATELY_S = 60.0  # window of the rate that predicts the time left
SAMPLE_S = 0.5  # least time between two kept samples


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a job over all runs, running rows included; `left_s` is None while unknown."""

    rows: int
    total: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    mean_tokens_per_s: float
    left_s: float | None
    mean_acceptance_length: float | None
    engines: int
    answering: bool


class ProgressMeter:
    """Computes progress from stats of rows and engines; `left` None: rows that the first stats lack."""

    def __init__(self, total: int, left: int | None = None, clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._num_left = left
        self._clock = clock
        self._earlier: tuple[int, int, int] | None = None  # rows, tokens in and out before this run
        self._samples: deque[tuple[float, int]] = deque()  # time, completion tokens of this run
        self._begin_s: float | None = None  # when the first row of this run was seen

    def update(self, stats: RowStats, live: EngineTotals, engines: int) -> Progress:
        """Return the progress from durable rows of all runs and totals of this run's engines."""
        if self._earlier is None:
            self._earlier = stats.rows, stats.prompt_tokens, stats.completion_tokens
            self._num_left = self._total - stats.rows if self._num_left is None else self._num_left
        rows, tokens_in, tokens_out = self._earlier
        durable_rows, durable_tokens = stats.rows - rows, stats.completion_tokens - tokens_out
        done, tokens = max(durable_rows, live.rows_done), max(durable_tokens, live.completion_tokens)
        assert self._num_left is not None
        left = max(0, self._num_left - done)
        answering = bool(done or tokens or live.rows_running)
        self._sample(tokens, answering)
        left_s = None
        if durable_rows and done >= live.rows_running:  # before that only short rows are done
            # Tokens to come: those of the rows left, less what the running rows have already.
            tokens_per_row = durable_tokens / durable_rows
            running = max(0.0, tokens - durable_tokens - (done - durable_rows) * tokens_per_row)
            rate = self._rate(LATELY_S)
            if not left:
                left_s = 0.0
            elif rate > 0:
                left_s = max(0.0, left * tokens_per_row - running) / rate
        elapsed_s = 0.0 if self._begin_s is None else self._samples[-1][0] - self._begin_s
        return Progress(
            rows=self._total - left,
            total=self._total,
            failed=stats.failed,
            prompt_tokens=tokens_in + max(stats.prompt_tokens - tokens_in, live.prompt_tokens),
            completion_tokens=tokens_out + tokens,
            tokens_per_s=self._rate(NOW_S),
            mean_tokens_per_s=tokens / elapsed_s if elapsed_s > 0 else 0.0,
            left_s=left_s,
            mean_acceptance_length=live.mean_acceptance_length or stats.mean_acceptance_length,
            engines=engines,
            answering=answering,
        )

    def _sample(self, tokens: int, answering: bool) -> None:
        """Add a sample of this run's completion tokens; a rate is that between two samples."""
        now_s = self._clock()
        if answering and self._begin_s is None:
            self._begin_s = now_s
        counters_fell = bool(self._samples) and tokens < self._samples[-1][1]  # an engine is gone
        if not answering or counters_fell:
            self._samples.clear()
        # The last sample is always the current one: it replaces the last if that came soon after its own
        # predecessor.
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < SAMPLE_S:
            self._samples.pop()
        self._samples.append((now_s, tokens))
        # The oldest one kept is the first that is older than the longest window.
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - LATELY_S:
            self._samples.popleft()

    def _rate(self, seconds: float) -> float:
        now_s, tokens = self._samples[-1]
        then_s, then = now_s, tokens
        for sample_s, sampled in reversed(self._samples):
            then_s, then = sample_s, sampled
            if sample_s <= now_s - seconds:
                break
        return (tokens - then) / (now_s - then_s) if now_s > then_s else 0.0


class ProgressView:
    def __init__(self, console: Console | None = None) -> None:
        self._pace: ProgressMeter | None = None
        self._console = console or Console(stderr=True)
        self._printed_s = time.monotonic()
        self._first_rows: int | None = None  # rows that were done before this run
        self._is_first_print = True  # no row of this run has been printed yet
        self._bar: Bar | None = None
        self._words = Text("loading the models", style="dim")

    def begin(self, total_rows: int, *, left: int | None = None) -> None:
        self._pace = ProgressMeter(total_rows, left)
        if self._console.is_terminal:
            columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("rows"), BarColumn(None))
            self._bar = Bar(*columns, TaskProgressColumn(), TextColumn("{task.description}"), expand=True)
            self._bar.add_task("", total=total_rows)
            self._live = Live(Group(self._bar, self._words), console=self._console, transient=True)
            self._live.start()
        else:
            print(f"{total_rows} rows; loading the models", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._live.stop()

    @property
    def has_started(self) -> bool:
        return self._pace is not None

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def update(
        self, stats: RowStats, live: EngineTotals | None = None, engines: int | None = None
    ) -> Progress:
        """Show the progress now; arguments as of `ProgressMeter.update`. Cheap enough for every second."""
        assert self._pace is not None, "begin() first"
        now = self._pace.update(stats, live or EngineTotals(), engines or 0)
        left = "" if not now.left_s else f"about {format_duration(now.left_s)} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=now.rows, description=left)
            self._words.plain = "; ".join(self._numbers(now))
        elif time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S or self._is_first_row(now.rows):
            self._printed_s = time.monotonic()
            share = f" ({100 * now.rows / now.total:.0f} %)" if now.total else ""
            words = (f"{now.rows}/{now.total} rows{share}", *self._numbers(now), left)
            print("; ".join(filter(None, words)), file=sys.stderr, flush=True)
        return now

    def _is_first_row(self, rows: int) -> bool:
        if self._first_rows is None:
            self._first_rows = rows
        is_first = self._is_first_print and rows != self._first_rows
        self._is_first_print = self._is_first_print and not is_first
        return is_first

    def _numbers(self, now: Progress) -> list[str]:
        engines = [f"{now.engines} engine" + "s" * (now.engines != 1)] if now.engines else []
        if not now.answering:
            return [*engines, "loading the models"]
        return [
            f"{now.failed} failed",
            f"{now.prompt_tokens} tokens in, {now.completion_tokens} out",
            f"{now.tokens_per_s:.0f} tokens/s now, {now.mean_tokens_per_s:.0f} on average",
            f"{decimals(now.mean_acceptance_length)} tokens per step",
            *engines,
        ]


class JobGauges:
    """Ray metrics of one job, tagged `job`. Ray must be joined; values appear after about ten seconds."""

    def __init__(self, job: str) -> None:
        self._gauges = {
            metric.name: Gauge(metric.name, metric.help, metric.labels) for metric in BATCH_CATALOGUE
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({"job": job})

    def show(self, now: Progress) -> None:
        values = {
            "manta_batch_rows": now.total,
            "manta_batch_rows_done": now.rows,
            "manta_batch_rows_failed": now.failed,
            "manta_batch_prompt_tokens": now.prompt_tokens,
            "manta_batch_generation_tokens": now.completion_tokens,
            "manta_batch_tokens_per_second": now.tokens_per_s,
            "manta_batch_seconds_left": now.left_s,
            "manta_batch_mean_accepted_length": now.mean_acceptance_length,
            "manta_batch_engines": now.engines,
        }
        for name, value in values.items():
            if value is not None:
                self._gauges[name].set(value)
