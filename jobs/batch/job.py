"""`manta batch`: a dataset through engines on Ray, row by row, into an output that loses nothing.

    files ─ survey ─▶ leases ─▶ engine actors ─▶ segments, parts     (they read and write: `engine.py`)
                        ▲            │
                    LeaseBook ◀── driver ──▶ progress, report, _SUCCESS  (it writes no row)

The driver may be killed at any time: what is answered is in the output, and the same command goes on from
there.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import ray

from ...actors.batch.figures import RowFigures
from ...actors.batch.source import check_columns, open_source
from ...actors.batch.storage import Storage
from ...actors.executor import make_executor
from ...actors.targets.loading.plan import plan_load
from ...cluster.config import EngineConfig
from ...cluster.errors import DatasetError, OutputError, shown_url
from ...cluster.executor import Executor
from ...cluster.row_ranges import count, minus, union
from ..stop import Stopped, StopSignals
from .gauges import JobGauges
from .messages import EngineSetup
from .opening import Opening
from .options import BatchOptions
from .pool import Done, Job
from .progress import ProgressView
from .report import Report, make_report
from .run import EngineRun, Event, Phase
from .samples import samples

OPENING_S = 1.0  # a small input is known before Ray is asked for anything
TIME_UP_EXIT_CODE = 3


class TimeUp(Stopped):
    """The job's own limit has ended it: `--limit-time`."""

    def __init__(self, limit_s: float) -> None:
        BaseException.__init__(self, f"stopped by its time limit of {limit_s:g} s")
        self.exit_code = TIME_UP_EXIT_CODE
        self.told = False


def run_batch(
    config: EngineConfig,
    options: BatchOptions,
    signals: StopSignals | None = None,
    *,
    make: Callable[[EngineConfig], Executor] = make_executor,
) -> Report:
    """Answer every row of the input that is not answered yet; returns the report on all rows.

    Failed rows do not fail the job, nor do rows that kill engines.

    Args:
        signals: end the job with `Stopped`; without them the caller's handlers stand.
        make: builds each engine's executor, in its actor. Must be picklable.

    Raises:
        ConfigError, DatasetError: before anything is answered.
        OutputError, EngineDeadError, PlacementError: later; what is answered is kept.
        TimeUp: the time limit has come.
    """
    source = open_source(options.input, options.input_format)
    layout = options.layout(source, config)
    check_columns(source, layout)
    options.format(source)
    output = Storage.open(options.output, field="output")
    _check_models(config)
    setup = EngineSetup(
        config=config,
        source=source,
        layout=layout,
        model_name=options.model_name or config.model,
        output=output,
        make=make,
    )
    with _View() as view, closing(Opening(setup, options, view.say)) as opening:
        with suppress(NotYet):
            view.show(opening.job.result(OPENING_S))
        if not (opening.job.done() and _nothing_is_left(opening.job.result())):
            _Driver(setup, options, opening, view, signals or StopSignals()).answer()
        try:
            return _finish(opening.job.result(), view, setup, options)
        except Stopped as stopped:
            view.say(f"{stopped}: all rows are answered; the same command writes the report")
            stopped.told = True
            raise


def check_answered(figures: RowFigures, options: BatchOptions) -> None:
    """Raise DatasetError when no row at all was answered: something is wrong with all of them."""
    if figures.failed and figures.failed == figures.rows:
        raise DatasetError(
            f"All {figures.rows} rows failed, the first with: {figures.first_error} The rows' errors and "
            f"inputs are in {shown_url(options.output)}.",
            param="input",
        )


class _Driver:
    """Follows the engines until their work is done, or it is to end."""

    def __init__(
        self, setup: EngineSetup, options: BatchOptions, opening: Opening, view: _View, signals: StopSignals
    ) -> None:
        self._options = options
        self._opening = opening
        self._view = view
        self._signals = signals
        self._run = EngineRun(setup, options.concurrency, opening.job)
        limit_s = options.limit_time_s
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s

    def answer(self) -> None:
        """Returns when all rows are answered. Raises Stopped, or what ended the engines' work."""
        self._opening.job.add_done_callback(lambda _: self._run.tell(Phase.OPENED))
        with self._signals.told_to(self._run.tell):
            self._run.start()
            try:
                self._follow()
            except BaseException as error:
                self._say_what_is_kept(error)
                raise
            finally:
                self._run.end()

    def _follow(self) -> None:
        stopped: Stopped | None = None
        while (event := self._next_event()) is not Phase.LEFT:
            if isinstance(event, Done):
                self._view.update(event)
            elif isinstance(event, str):
                self._view.say(event)
            elif event is Phase.CONNECTED:
                self._signals.take_back()
            elif event is Phase.OPENED:
                self._view.show(self._opening.job.result())
            elif isinstance(event, (signal.Signals, TimeUp)):
                stopped = event if isinstance(event, TimeUp) else Stopped(event)
                self._deadline_s = None
                if not self._run.stop():
                    raise stopped
            elif isinstance(event, BaseException):
                raise event if stopped is None else stopped from event
        if stopped is not None:
            raise stopped

    def _next_event(self) -> Event | TimeUp:
        if self._deadline_s is None:
            return self._run.next_event()
        try:
            return self._run.next_event(max(self._deadline_s - time.monotonic(), 0.0))
        except queue.Empty:
            assert self._options.limit_time_s is not None
            return TimeUp(self._options.limit_time_s)

    def _say_what_is_kept(self, error: BaseException) -> None:
        """What the output holds now that the job ends early, in words."""
        if (job := self._view.job) is None:
            return
        with suppress(OutputError):  # then what was read last
            job.ledger.refresh()
        ledger = job.ledger
        waiting = (ledger.durable(writer) for writer in ledger.orphans)
        kept = count(union(ledger.answered, ledger.failed, *waiting))
        words = f"{kept} of {job.num_rows} rows are in {shown_url(self._options.output)}; "
        words += "the same command goes on there"
        if self._options.overwrite:
            words += " without --overwrite"
        if isinstance(error, Stopped):
            error.told = True
            words = f"{error}: {words}"
        self._view.say(words)


class _View:
    """Progress, from when it is known of how many rows; lines for the user at any time."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.done = Done()  # in this run
        self._before = RowFigures()
        self._view: ProgressView | None = None
        self._gauges: JobGauges | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.__exit__(kind, error, trace)

    def show(self, job: Job) -> None:
        """Begin to show progress. Once."""
        if self.job is None:
            failed = minus(job.ledger.failed, job.rows)  # others are answered again
            self.job, self._before = (
                job,
                replace(job.ledger.figures, rows=job.num_rows - count(job.rows), failed=count(failed)),
            )
            if not _nothing_is_left(job):
                left, compares = count(job.rows), job.plain_rows > 0
                self._view = ProgressView(job.num_rows, left=left, compares=compares).__enter__()

    def say(self, line: str) -> None:
        if self._view is not None:
            self._view.say(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def update(self, done: Done) -> None:
        """Show what is done in this run, beside the rows of earlier ones."""
        self.done = done
        if self._view is None or self.job is None:
            return
        together = RowFigures()
        for each in (self._before, done.rows):
            together.merge(each)
        now = self._view.update(together, done.live, done.engines)
        if ray.is_initialized():
            self._gauges = self._gauges or JobGauges(self.job.paper.fingerprint[:12])
            self._gauges.show(now)


def _nothing_is_left(job: Job) -> bool:
    return not job.rows and not job.ledger.orphans


def _finish(job: Job, view: _View, setup: EngineSetup, options: BatchOptions) -> Report:
    """The end of a job whose rows are all durable."""
    ledger, paper = job.ledger, job.paper
    if not ledger.complete:
        ledger.refresh()
    report = make_report(
        ledger.figures,
        ledger.device if ledger.complete else view.done.live.device,
        {
            "output": shown_url(options.output),
            "input": [shown_url(each) for each in options.input],
            "fingerprint": paper.fingerprint,
            **paper.made_from,
            **paper.about,
        },
        price_per_gpu_hour=options.price_per_gpu_hour,
        samples=samples(ledger.figures, setup.source, setup.layout, job.survey),
    )
    if ledger.complete:
        view.say("all rows are answered already; nothing is left to do")
    else:
        ledger.finish(report.as_json(), report.html())
    return report


def _check_models(config: EngineConfig) -> None:
    """Check the checkpoints before Ray starts. What the engines compute with is another node's matter."""
    if config.device != "cpu":
        config = replace(config, device="cpu", attention_backend="auto")
    plan_load(config)
