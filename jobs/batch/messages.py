"""Messages between a batch job's driver and its engines: small picklable values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...actors.batch.dataset.row_reader import RowSpans
from ...actors.batch.dataset.row_requests import RowSchema
from ...actors.batch.dataset.source import Dataset
from ...actors.batch.dataset.storage import Storage
from ...actors.batch.ledger.output_parts import OutputForm
from ...actors.batch.row_stats import EngineTotals, RowStats
from ...cluster.batch.row_ranges import RowRanges
from ...cluster.config import EngineConfig
from ...cluster.step.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    config: EngineConfig
    source: Dataset
    row_schema: RowSchema
    model_name: str
    output: Storage
    make: Callable[[EngineConfig], Executor]


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Settings known once the input is indexed."""

    run: int
    form: OutputForm


@dataclass(frozen=True, slots=True)
class LeasedRows:
    """A lease as an engine gets it. `attempts`: how often its rows are started, this time included."""

    number: int
    rows: RowRanges
    spans: RowSpans
    shard: int | None
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """State of an engine: durable `rows`, running ones in `engine`; `failing_s`: output is not writable."""

    rows: RowStats = field(default_factory=RowStats)
    engine: EngineTotals = field(default_factory=EngineTotals)
    running: int = 0
    capacity: int = 1
    waiting: int = 0
    failing_s: float | None = None
