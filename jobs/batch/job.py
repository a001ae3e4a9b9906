"""`manta batch`: answers a dataset with engines on Ray, and writes each row exactly once.

    files ─ index ──▶ leases ─▶ engine actors ─▶ segments, parts     (they read and write: `engine_actor.py`)
                        ▲            │
                 LeaseManager ◀── driver ──▶ progress, report, _SUCCESS  (it writes no row)

The driver may be killed at any time: answered rows are in the output, and the same command resumes there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from enum import Enum, auto

import ray

from ...actors.batch.dataset.source import check_columns, open_source
from ...actors.batch.dataset.storage import Storage
from ...actors.batch.row_stats import RowStats
from ...actors.checkpoints.checkpoint_paths import served_name
from ...actors.engine.uniproc_executor import make_executor
from ...cluster.batch.row_ranges import count, difference, union
from ...cluster.config import EngineConfig
from ...cluster.errors import DatasetError, OutputError, brief_url
from ...cluster.step.executor import Executor
from ..common.model_check import check_model
from ..common.ray_session import join_or_start_ray
from ..common.stop_signals import Stopped, StopSignals
from .engine_handle import root_cause
from .engine_pool import EngineJob, EnginePool, RunProgress
from .messages import EngineSetup
from .options import BatchOptions
from .preflight import text_prompts
from .progress import JobGauges, ProgressView
from .report import Report
from .startup import Startup

STARTUP_S = 1.0  # a finished job with a small input is recognized before Ray starts
END_TIMEOUT_S = 30.0
TIME_UP_EXIT_CODE = 3


class TimeUp(Stopped):
    def __init__(self, limit_s: float) -> None:
        BaseException.__init__(self, f"stopped by its time limit of {limit_s:g} s")
        self.exit_code = TIME_UP_EXIT_CODE
        self.is_reported = False


def run_batch(
    config: EngineConfig,
    options: BatchOptions,
    signals: StopSignals | None = None,
    *,
    make: Callable[[EngineConfig], Executor] = make_executor,
) -> Report:
    """Answer every row of the input that is not answered yet; return the report on all rows.

    Failed rows do not fail the job, nor do rows that kill engines. Answered rows are kept when it raises.
    `signals` end it with `Stopped`; the picklable `make` builds an executor in each engine's actor.
    """
    source = open_source(options.input, options.input_format)
    row_schema = options.row_schema(source, config)
    check_columns(source, row_schema)
    options.format(source)
    output = Storage.open(options.output, field="output")
    check_model(config, elsewhere=True)
    row_schema = options.continued(row_schema, source, config, output)
    setup = EngineSetup(
        config=config,
        source=source,
        row_schema=row_schema,
        model_name=options.model_name or served_name(config.model),
        output=output,
        make=make,
    )
    with ProgressView() as view, closing(Startup(setup, options, view.say)) as startup:
        if words := text_prompts(row_schema, source):
            view.say(words)
        driver = _Driver(setup, options, startup, view, signals or StopSignals())
        with suppress(NotYet):
            driver.show(startup.job.result(STARTUP_S))
        if driver.job is None or not _is_complete(driver.job):
            driver.answer()
        try:
            return driver.finish()
        except Stopped as stopped:
            view.say(f"{stopped}: all rows are answered; the same command writes the report")
            stopped.is_reported = True
            raise


def check_answered(stats: RowStats, options: BatchOptions) -> None:
    if stats.failed and stats.failed == stats.rows:
        raise DatasetError(
            f"All {stats.rows} rows failed, the first with: {stats.first_error} The rows' errors and "
            f"inputs are in {brief_url(options.output)}.",
            param="input",
        )


class _Phase(Enum):
    """Ray is joined and has replaced the signal handlers; the rows are known; the engines have left."""

    CONNECTED = auto()
    PREPARED = auto()
    DRAINED = auto()


# What is done in this run, a line for the user, a signal, the time limit, or why the run failed.
_Event = _Phase | RunProgress | str | signal.Signals | BaseException


class _Driver:
    """Runs the engines in a thread, and handles their events until they are done or the job ends early."""

    def __init__(
        self,
        setup: EngineSetup,
        options: BatchOptions,
        startup: Startup,
        view: ProgressView,
        signals: StopSignals,
    ) -> None:
        self.job: EngineJob | None = None
        self._done = RunProgress()  # in this run
        self._before = RowStats()  # of earlier runs
        self._gauges: JobGauges | None = None
        self._setup = setup
        self._options = options
        self._startup = startup
        self._view = view
        self._signals = signals
        limit_s = options.limit_time_s
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()  # `put` is safe in a signal handler
        self._lock = threading.Lock()  # of the next three
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: EnginePool | None = None

    def show(self, job: EngineJob) -> None:
        if self.job is None:
            self.job = job
            failed = difference(job.ledger.failed, job.rows)  # others are answered again
            earlier = job.num_rows - count(job.rows)
            self._before = replace(job.ledger.stats, rows=earlier, failed=count(failed))
            if not _is_complete(job):
                self._view.begin(job.num_rows, left=count(job.rows))

    def finish(self) -> Report:
        """Write the report of a job with all rows durable, and finish its output."""
        job, options = self._startup.job.result(), self._options
        ledger, spec = job.ledger, job.spec
        if not ledger.complete:
            ledger.refresh()
        report = Report(
            ledger.stats,
            ledger.device if ledger.complete else self._done.live.device,
            {
                "output": brief_url(options.output),
                "input": [brief_url(each) for each in options.input],
                "fingerprint": spec.fingerprint,
                **spec.made_from,
                **spec.about,
            },
            price_per_gpu_hour=options.price_per_gpu_hour,
        )
        if ledger.complete:
            self._view.say("all rows are answered already; nothing is left to do")
        else:
            ledger.finish(report.as_json())
        return report

    def answer(self) -> None:
        """Return when all rows are answered. Raises Stopped, or what ended the engines' work."""
        self._startup.job.add_done_callback(lambda _: self._events.put(_Phase.PREPARED))
        engines = threading.Thread(target=self._run_engines, name="manta-batch", daemon=True)
        with self._signals.notifying(self._events.put):
            engines.start()
            try:
                self._handle_events()
            except BaseException as error:
                self._print_kept_rows(error)
                raise
            finally:
                self._stop()
                engines.join(END_TIMEOUT_S)

    def _handle_events(self) -> None:
        """Show what the engines' thread reports, until all rows are done. Raises what ended it.

        A signal or the time limit stops the engines; this then waits until their finished rows are written.
        If nothing runs yet, it raises Stopped at once.
        """
        stopped: Stopped | None = None
        while (event := self._next_event()) is not _Phase.DRAINED:
            if isinstance(event, RunProgress):
                self._update(event)
            elif isinstance(event, str):
                self._view.say(event)
            elif event is _Phase.CONNECTED:
                self._signals.reinstall()
            elif event is _Phase.PREPARED:
                self.show(self._startup.job.result())
            elif isinstance(event, (signal.Signals, TimeUp)):
                stopped = event if isinstance(event, TimeUp) else Stopped(event)
                self._deadline_s = None
                if not self._stop():
                    raise stopped
            elif isinstance(event, BaseException):
                raise event if stopped is None else stopped from event
        if stopped is not None:
            raise stopped

    def _update(self, done: RunProgress) -> None:
        self._done = done
        if self.job is None or not self._view.has_started:
            return
        together = RowStats()
        for each in (self._before, done.rows):
            together.merge(each)
        now = self._view.update(together, done.live, done.engines)
        if ray.is_initialized():
            self._gauges = self._gauges or JobGauges(self.job.spec.fingerprint[:12])
            self._gauges.show(now)

    def _next_event(self) -> _Event:
        if self._deadline_s is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(self._deadline_s - time.monotonic(), 0.0))
        except queue.Empty:
            assert self._options.limit_time_s is not None
            return TimeUp(self._options.limit_time_s)

    def _stop(self) -> bool:
        """Request that the engines leave; DRAINED follows. Returns False if there are none."""
        with self._lock:
            self._stopping = True
            if self._pool is None or self._loop is None:
                return False
            self._loop.call_soon_threadsafe(self._pool.stop)
            return True

    def _run_engines(self) -> None:
        try:
            with _joined_ray():
                self._events.put(_Phase.CONNECTED)
                asyncio.run(self._run_pool())
        except BaseException as error:  # the thread's edge
            self._events.put(root_cause(error))

    async def _run_pool(self) -> None:
        with self._lock:
            if self._stopping:
                return
            put = self._events.put
            pool = self._pool = EnginePool(self._setup, self._options.concurrency, put, put)
            self._loop = asyncio.get_running_loop()
        try:
            await pool.run(asyncio.wrap_future(self._startup.job))
            put(_Phase.DRAINED)
        except BaseException as error:
            put(root_cause(error))  # before the engines are ended, which takes a while
        finally:
            with self._lock:
                self._pool = None
            await pool.close()

    def _print_kept_rows(self, error: BaseException) -> None:
        if (job := self.job) is None:
            return
        with suppress(OutputError):  # then what was read last counts
            job.ledger.refresh()
        ledger = job.ledger
        waiting = (ledger.durable(writer) for writer in ledger.orphans)
        kept = count(union(ledger.answered, ledger.failed, *waiting))
        words = f"{kept} of {job.num_rows} rows are in {brief_url(self._options.output)}; "
        words += "the same command continues there"
        if self._options.overwrite:
            words += " without --overwrite"
        if isinstance(error, Stopped):
            error.is_reported = True
            words = f"{error}: {words}"
        self._view.say(words)


def _is_complete(job: EngineJob) -> bool:
    return not job.rows and not job.ledger.orphans


@contextmanager
def _joined_ray() -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    join_or_start_ray(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
