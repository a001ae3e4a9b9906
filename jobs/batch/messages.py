"""What passes between a batch job's driver and its engines: values, picklable and small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...actors.batch.figures import EngineFigures, RowFigures
from ...actors.batch.parts import OutputForm
from ...actors.batch.reading import Work
from ...actors.batch.rows import Layout
from ...actors.batch.source import Source
from ...actors.batch.storage import Storage
from ...cluster.config import EngineConfig
from ...cluster.executor import Executor
from ...cluster.row_ranges import RowRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What all engines of a job have in common. Picklable.

    Attributes:
        config: of the engine; admission limits do not apply to batch rows.
        layout: how records are read.
        model_name: reported in OpenAI responses.
        make: builds the executor.
    """

    config: EngineConfig
    source: Source
    layout: Layout
    model_name: str
    output: Storage
    make: Callable[[EngineConfig], Executor]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is known when the input has been looked at and the output is ours. Picklable.

    Attributes:
        run: the number of the job's run.
        form: of the results; where order is preserved, rows are started in theirs.
        plain_rows: that the first engine answers plainly, to measure what speculation is worth.
    """

    run: int
    form: OutputForm
    plain_rows: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Where an engine is."""

    node_id: str


@dataclass(frozen=True, slots=True)
class LeasedWork:
    """A lease as an engine gets it. `attempts`: how often its rows are begun, this time included."""

    number: int
    rows: RowRanges
    work: Work
    shard: int | None
    attempts: int


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What became of a lease's rows: durable, or given back. Together they are all of them."""

    answered: RowRanges
    returned: RowRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What an engine does, and has done since it started.

    Attributes:
        rows: of durable results.
        engine: of all that it did, rows under way among it.
        running: rows in the engine; at most `capacity` are wanted there.
        waiting: rows that could be given back.
        failing_s: how long the output cannot be written already; None while it can.
    """

    rows: RowFigures = field(default_factory=RowFigures)
    engine: EngineFigures = field(default_factory=EngineFigures)
    running: int = 0
    capacity: int = 1
    waiting: int = 0
    failing_s: float | None = None
