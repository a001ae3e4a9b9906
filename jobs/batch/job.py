"""`manta batch`: a dataset through engines on Ray, row by row, into an output that loses nothing.

    files ─ survey ─▶ leases ─▶ engine actors ─▶ segments, parts        (the engines read and write: `engine.py`)
                        ▲            │
                    LeaseBook ◀── driver ──▶ progress, report, _SUCCESS  (it writes no row)

The driver may be killed at any time: what is answered is in the output, and the same command goes on from
there.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

from ...actors.batch.figures import RowFigures
from ...actors.batch.rows import Layout
from ...actors.batch.source import Source, check_columns, open_source
from ...actors.batch.storage import Storage
from ...actors.executor import make_executor
from ...actors.targets.loading.plan import plan_load
from ...cluster.config import EngineConfig
from ...cluster.errors import DatasetError, MantaError
from ...cluster.executor import Executor
from ...cluster.row_ranges import count
from ..stop import Stopped, StopSignals
from .engine import EngineSetup
from .opening import Opening
from .options import BatchOptions
from .pool import Job
from .progress import ProgressView
from .run import EngineRun, Phase

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
) -> RowFigures:
    """Answer every row of the input that is not answered yet; returns the figures of all rows.

    Failed rows do not fail the job, nor do rows that kill engines.

    Args:
        signals: end the job with `Stopped`; without them the caller's handlers stand.
        make: builds each engine's executor, in its actor. Must be picklable.

    Raises:
        ConfigError, DatasetError: before anything is answered.
        OutputError, EngineDeadError, PlacementError: later; what is answered is kept.
        TimeUp: the time limit has come.
    """
    started_s = time.monotonic()
    source = open_source(options.input, options.input_format)
    layout = options.layout(source, config)
    check_columns(source, layout)
    options.format(source)
    Storage.open(options.output, field="output")
    check_models(config)
    signals = signals or StopSignals()
    with ProgressView() as view, contextlib.closing(
        Opening(source, layout, config, options, view.say)
    ) as opening:
        with contextlib.suppress(NotYet):
            if _nothing_to_do(job := opening.job.result(OPENING_S)):
                return _finished(job, view, started_s)
        driver = Driver(options, opening, view)
        driver.answer(_setup(config, options, source, layout, make), signals)
        return _finished(opening.job.result(), view, started_s)


def check_answered(figures: RowFigures, options: BatchOptions) -> None:
    """Raise DatasetError when no row at all was answered: something is wrong with all of them."""
    if figures.failed and figures.failed == figures.rows:
        raise DatasetError(
            f"All {figures.rows} rows failed, the first with: {figures.first_error} The rows' errors and "
            f"inputs are in {options.output}.",
            param="input",
        )
