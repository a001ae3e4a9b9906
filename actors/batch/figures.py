"""What rows cost, counted: figures that add up over rows, parts, engines and runs of a job.

`RowFigures` are made of results and are stored beside every part, so they are what a job's report is made
of, whoever was killed meanwhile. `EngineFigures` are what living engines say, for progress; they end with
their engines, and what must last of them is stamped on results (`metering.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from ...cluster.acceptance import mean_acceptance_length
from ...cluster.plain_sample import Comparison
from ..files import rounded
from .tallies import Categories, Category, Floats, Ints, Stretches, Timeline, add_lists, lengths

# What an engine stamps on a result: what it spent since the result before. Times in device-seconds (an engine
# of 4 GPUs spends 4 a second): held at all, with rows to be answered, with a row running; then both sides of
# its plain sample (`cluster/plain_sample.py`), on the result with which the comparison ended.
SPENT = (
    *("device_s", "open_s", "busy_s"),
    *("plain_tokens", "plain_s", "drafted_tokens", "drafted_s"),
)
SUMMED = (
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
    *("num_steps", "num_draft_tokens", "num_accepted_tokens"),
)
MAX_MESSAGE = 400  # characters of an error that is shown as an example
NUM_SAMPLES, MAX_SAMPLE = 3, 400  # answers that are shown, and their characters


Device = Literal["GPU", "core", "device"]  # what engines hold and times are counted in; "device": not known


class Compared:
    """Whoever has both sides of a plain sample."""

    plain_tokens: int
    plain_s: float
    drafted_tokens: int
    drafted_s: float

    @property
    def comparison(self) -> Comparison | None:
        """What speculation was worth; None if that was not measured."""
        if not (self.plain_tokens and self.plain_s and self.drafted_tokens and self.drafted_s):
            return None
        return Comparison(self.plain_tokens, self.plain_s, self.drafted_tokens, self.drafted_s)


@dataclass(slots=True)
class RowFigures(Compared):
    """Counts over results.

    Attributes:
        rows, failed: all rows, and those of them that failed.
        retried: rows that were begun more than once in a run, since an engine died.
        errors: by the error's type, how many rows failed with it, and the message of one of them.
        cached_prompt_tokens: of prompt_tokens, those whose K/V were there already.
        num_steps: blocks that were verified; `num_draft_tokens`, `num_accepted_tokens`: drafts in them.
        acceptance: in how many of them so many drafts were accepted, by that number.
        prompt_lengths, output_lengths: histograms (`tallies.lengths`) of rows' tokens; failed rows have none.
        samples: number, id and answer of the first rows that were answered.
        stretches, timeline: when rows were worked on, and when their tokens were there.
        device_s, ..., drafted_s: see SPENT.
    """

    rows: int = 0
    failed: int = 0
    retried: int = 0
    errors: dict[str, ErrorCount] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance: list[int] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    output_lengths: list[int] = field(default_factory=list)
    samples: list[tuple[int, str, str]] = field(default_factory=list)
    categories: Categories = field(default_factory=Categories)
    stretches: Stretches = field(default_factory=Stretches)
    timeline: Timeline = field(default_factory=Timeline)
    device_s: float = 0.0
    open_s: float = 0.0
    busy_s: float = 0.0
    plain_tokens: int = 0
    plain_s: float = 0.0
    drafted_tokens: int = 0
    drafted_s: float = 0.0

    def add(self, results: pa.Table) -> None:
        """Count a table of results (`answering.WIRE_SCHEMA`)."""
        if results.num_rows:
            self.merge(_counted(results))

    def merge(self, other: RowFigures) -> None:
        """Count what another has counted."""
        for name in ("rows", "failed", "retried", *SUMMED, *SPENT):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("acceptance", "prompt_lengths", "output_lengths"):
            setattr(self, name, add_lists(getattr(self, name), getattr(other, name)))
        for kind, count in other.errors.items():
            self.errors.setdefault(kind, ErrorCount(0, count.example)).merge(count)
        self.samples = sorted({*self.samples, *other.samples})[:NUM_SAMPLES]
        self.categories.merge(other.categories)
        self.stretches.merge(other.stretches)
        self.timeline.merge(other.timeline)

    def counts(self) -> dict[str, Any]:  # Any: JSON
        """All of it, for `from_counts`."""
        return asdict(self)

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> Self:
        return cls(
            **{
                **counts,
                "errors": {kind: ErrorCount(**count) for kind, count in counts["errors"].items()},
                "samples": [tuple(sample) for sample in counts.get("samples", ())],
                "categories": Categories.from_counts(counts["categories"]),
                "stretches": Stretches(**counts["stretches"]),
                "timeline": Timeline.from_counts(counts["timeline"]),
            }
        )

    @property
    def first_error(self) -> str:
        """The example of the most frequent error; empty if no row failed."""
        return self.ranked_errors()[0][1].example if self.errors else ""

    def ranked_errors(self) -> list[tuple[str, ErrorCount]]:
        """By the error's type, the most frequent first."""
        return sorted(self.errors.items(), key=lambda item: (-item[1].rows, item[0]))

    @property
    def wall_s(self) -> float:
        """Time in which rows were worked on; the pauses between runs are not in."""
        return self.stretches.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "rows": self.rows,
            "failed": self.failed,
            "retried": self.retried,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "mean_acceptance_length": rounded(self.mean_acceptance_length),
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


@dataclass(slots=True)
class ErrorCount:
    """Rows that failed in one way."""

    rows: int
    example: str  # the first in the alphabet, so that it depends on no order

    def merge(self, other: ErrorCount) -> None:
        self.rows += other.rows
        self.example = min(self.example, other.example)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures(Compared):
    """What one engine actor has done since it started, or several together. Cumulative; of this run only.

    Attributes:
        rows_done: answered or failed here.
        rows_running: started and not done.
        prompt_tokens, completion_tokens, num_steps, num_accepted_tokens: by the engine's counters, so those
            of running rows are in. `num_steps` are verified blocks, as in `RowFigures`.
        device_s: device-seconds since the engine began to load, those after its last row among them.
        open_s: device-seconds between the first row's start and the last row's end (or now, if rows run).
        busy_s: device-seconds in which a row was running.
        first_row_s, last_row_s: Unix time of the first row's start and the last one's end; 0 until then.
        num_devices: of `device`, that the engine holds.
        plain_tokens, plain_s, drafted_tokens, drafted_s: the plain sample, once it is whole.
    """

    rows_done: int = 0
    rows_running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_accepted_tokens: int = 0
    device_s: float = 0.0
    open_s: float = 0.0
    busy_s: float = 0.0
    first_row_s: float = 0.0
    last_row_s: float = 0.0
    device: Device = "device"
    num_devices: float = 0
    plain_tokens: int = 0
    plain_s: float = 0.0
    drafted_tokens: int = 0
    drafted_s: float = 0.0

    def merge(self, other: EngineFigures) -> EngineFigures:
        """Both together."""
        both: dict[str, Any] = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "device"
        }
        both["device"] = other.device if self.device == "device" else self.device
        starts = [start_s for start_s in (self.first_row_s, other.first_row_s) if start_s]
        both["first_row_s"] = min(starts, default=0.0)
        both["last_row_s"] = max(self.last_row_s, other.last_row_s)
        return EngineFigures(**both)

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)


def _counted(results: pa.Table) -> RowFigures:
    """Of one table."""
    timed = results.filter(results["end_s"].is_valid())  # those that no engine lived to end have no times
    answered = results.filter(results["error"].is_null())
    return RowFigures(
        rows=results.num_rows,
        failed=results.num_rows - answered.num_rows,
        retried=int(np.count_nonzero(_ints(results["attempts"]) > 1)),
        errors=_errors(results),
        **{name: int(_ints(results[name]).sum()) for name in SUMMED},
        acceptance=_acceptance(results["acceptance_histogram"]),
        prompt_lengths=lengths(_ints(answered["prompt_tokens"])),
        output_lengths=lengths(_ints(answered["completion_tokens"])),
        samples=_samples(answered),
        categories=_categories(results),
        stretches=Stretches.of(_floats(timed["begin_s"]), _floats(timed["end_s"])),
        timeline=Timeline.of(_floats(timed["end_s"]), _ints(timed["completion_tokens"])),
        **_spent(results["engine_spent"]),
    )


def _errors(results: pa.Table) -> dict[str, ErrorCount]:
    errors: dict[str, ErrorCount] = {}
    for error in results["error"].drop_null().to_pylist():
        one = ErrorCount(1, error["message"][:MAX_MESSAGE])
        errors.setdefault(error["type"], ErrorCount(0, one.example)).merge(one)
    return errors


def _samples(answered: pa.Table) -> list[tuple[int, str, str]]:
    first = answered.select(["row", "id", "text"]).sort_by("row").slice(0, NUM_SAMPLES)
    return [(row["row"] or 0, row["id"] or "", (row["text"] or "")[:MAX_SAMPLE]) for row in first.to_pylist()]


def _acceptance(histograms: pa.ChunkedArray) -> list[int]:
    """The rows' histograms, summed up by place."""
    known = histograms.combine_chunks().drop_null()
    sizes = np.diff(known.offsets.to_numpy())
    places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.bincount(places, weights=known.flatten().to_numpy()).astype(np.int64).tolist()


def _categories(results: pa.Table) -> Categories:
    named: dict[str, Category] = {}
    columns = ("counted_as", "error", "completion_tokens", "num_steps", "num_accepted_tokens")
    table = results.select(columns).filter(results["counted_as"].is_valid())
    for row in table.to_pylist():
        named.setdefault(row["counted_as"], Category()).merge(
            Category(
                rows=1,
                failed=row["error"] is not None,
                completion_tokens=row["completion_tokens"] or 0,
                num_steps=row["num_steps"] or 0,
                num_accepted_tokens=row["num_accepted_tokens"] or 0,
            )
        )
    categories = Categories()
    for name, sums in named.items():
        categories.add(name, sums)
    return categories


def _spent(column: pa.ChunkedArray) -> dict[str, Any]:  # Any: counts are whole, times are not
    fields_of = dict(zip(SPENT, column.flatten(), strict=True))
    sums = {name: float(_floats(values).sum()) for name, values in fields_of.items()}
    return {name: round(value) if name.endswith("_tokens") else value for name, value in sums.items()}


def _ints(column: pa.ChunkedArray) -> Ints:
    return column.fill_null(0).to_numpy().astype(np.int64)


def _floats(column: pa.ChunkedArray) -> Floats:
    return column.fill_null(0.0).to_numpy().astype(np.float64)
