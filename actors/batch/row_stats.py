"""Statistics of a batch job: counts that add up over rows, parts, engines and runs.

`RowStats` is computed from results and stored in the record of every part, so a job's report is complete even
after kills. `Failures` records which rows of a part failed in the same way, so that rows answered later no
longer count as failed. `EngineTotals` is what running engines report. Everything is bounded in size, and
merging gives the same result in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise, zip_longest
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...cluster.batch.row_ranges import RowRanges, count, from_rows, intersection, iterate_rows
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ..system.atomic_files import rounded

# Recorded on each result: what the engine spent since its previous result. The times are device-seconds (an
# engine with 4 GPUs spends 4 per second): held, with rows to answer, with a row running.
SPENT = ("device_s", "open_s", "busy_s")
SUMMED = (
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
    *("num_steps", "num_draft_tokens", "num_accepted_tokens"),
)
MAX_MESSAGE = 400  # characters of an error message kept as an example
MAX_NAMES = 24  # number of categories
MAX_NAME = 80  # characters of a category's name

Device = Literal["GPU", "core", "device"]  # what device-seconds count; "device": unknown


MAX_INTERVALS = 32
PAUSE_S = 15.0  # a longer gap between rows is a pause between runs

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def length_histogram(lengths: Ints) -> list[int]:
    """Count lengths by powers of two: index 0 counts zeros, index k lengths from 2^(k-1) to 2^k - 1."""
    return np.bincount(np.frexp(lengths.astype(np.float64))[1]).tolist() if len(lengths) else []


def length_range(index: int) -> tuple[int, int]:
    return (1 << index - 1, (1 << index) - 1) if index else (0, 0)


@dataclass(slots=True)
class RunIntervals:
    """The intervals in which a job ran, [begin, end] in Unix seconds; the shortest pauses are left out."""

    times: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, begins_s: Floats, ends_s: Floats) -> Self:
        made = cls()
        made._join(map(list, zip(begins_s.tolist(), ends_s.tolist(), strict=True)))
        return made

    def merge(self, other: RunIntervals) -> None:
        self._join([*self.times, *other.times])

    @property
    def seconds(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.times)

    def _join(self, times: Iterable[list[float]]) -> None:
        self.times = _joined(sorted(times), PAUSE_S)
        if len(self.times) > MAX_INTERVALS:
            gaps = sorted(after[0] - before[1] for before, after in pairwise(self.times))
            self.times = _joined(self.times, gaps[-MAX_INTERVALS])


def _joined(times: Iterable[Sequence[float]], longest_gap_s: float) -> list[list[float]]:
    joined: list[list[float]] = []
    for begin_s, end_s in times:
        if joined and begin_s <= joined[-1][1] + longest_gap_s:
            joined[-1][1] = max(joined[-1][1], end_s)
        else:
            joined.append([begin_s, end_s])
    return joined


@dataclass(slots=True)
class Category:
    rows: int = 0
    failed: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)

    def merge(self, other: Category) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Categories:
    """Sums of the alphabetically first MAX_NAMES categories, and of all others together in `rest`."""

    named: dict[str, Category] = field(default_factory=dict)
    rest: Category = field(default_factory=Category)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        named = {name: Category(**sums) for name, sums in content["named"].items()}
        return cls(named, Category(**content["rest"]))

    def add(self, name: str, sums: Category) -> None:
        """Add rows to a category. Long names are truncated."""
        self._merge_named({_short(name): sums})

    def merge(self, other: Categories) -> None:
        self.rest.merge(other.rest)
        self._merge_named(other.named)

    def ranked(self) -> list[tuple[str, Category]]:
        named = sorted(self.named.items(), key=lambda item: (-item[1].rows, item[0]))
        return [*named, ("(all others)", self.rest)] if self.rest.rows else named

    def _merge_named(self, named: Mapping[str, Category]) -> None:
        for name, sums in named.items():
            self.named.setdefault(name, Category()).merge(sums)
        for name in sorted(self.named)[MAX_NAMES:]:
            self.rest.merge(self.named.pop(name))


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


@dataclass(slots=True)
class NameCounts:
    """Rows by name, for the alphabetically first MAX_NAMES names; `num_others` counts all others together."""

    named: dict[str, int] = field(default_factory=dict)
    num_others: int = 0

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        made = cls()
        made.merge(cls(dict(Counter(map(_short, names)))))
        return made

    def merge(self, other: NameCounts) -> None:
        self.num_others += other.num_others
        for name, rows in other.named.items():
            self.named[name] = self.named.get(name, 0) + rows
        for name in sorted(self.named)[MAX_NAMES:]:
            self.num_others += self.named.pop(name)

    def ranked(self) -> list[tuple[str, int]]:
        named = sorted(self.named.items(), key=lambda item: (-item[1], item[0]))
        return [*named, ("(all others)", self.num_others)] if self.num_others else named


@dataclass(slots=True)
class ErrorCount:
    """Rows that failed with one type of error. The example is the alphabetically first message."""

    rows: int
    example: str

    def merge(self, other: ErrorCount) -> None:
        self.rows += other.rows
        self.example = min(self.example, other.example)


@dataclass(slots=True)
class RowStats:
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
    categories: Categories = field(default_factory=Categories)
    ignored: NameCounts = field(default_factory=NameCounts)  # columns and fields without effect
    stretches: RunIntervals = field(default_factory=RunIntervals)
    device_s: float = 0.0
    open_s: float = 0.0
    busy_s: float = 0.0

    def add(self, results: pa.Table) -> None:
        if results.num_rows:
            self.merge(_count_results(results))

    def merge(self, other: RowStats) -> None:
        for name in ("rows", "failed", "retried", *SUMMED, *SPENT):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("acceptance", "prompt_lengths", "output_lengths"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [mine + theirs for mine, theirs in pairs])
        for kind, errors in other.errors.items():
            self.errors.setdefault(kind, ErrorCount(0, errors.example)).merge(errors)
        self.categories.merge(other.categories)
        self.ignored.merge(other.ignored)
        self.stretches.merge(other.stretches)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read stored stats; fields of other versions are ignored."""
        known = {each.name for each in fields(cls)}
        return cls(
            **{
                **{name: value for name, value in content.items() if name in known},
                "errors": {kind: ErrorCount(**errors) for kind, errors in content["errors"].items()},
                "categories": Categories.from_json(content["categories"]),
                "ignored": NameCounts(**content.get("ignored", {})),
                "stretches": RunIntervals(**content["stretches"]),
            }
        )

    @property
    def first_error(self) -> str:
        return self.ranked_errors()[0][1].example if self.errors else ""

    def ranked_errors(self) -> list[tuple[str, ErrorCount]]:
        return sorted(self.errors.items(), key=lambda item: (-item[1].rows, item[0]))

    @property
    def wall_s(self) -> float:
        return self.stretches.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)

    def summary(self) -> dict[str, Any]:  # Any: JSON
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
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

    def merge(self, other: EngineTotals) -> EngineTotals:
        sums: dict[str, Any] = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "device"
        }
        starts_s = [start_s for start_s in (self.first_row_s, other.first_row_s) if start_s]
        return EngineTotals(
            **{
                **sums,
                "device": other.device if self.device == "device" else self.device,
                "first_row_s": min(starts_s, default=0.0),
                "last_row_s": max(self.last_row_s, other.last_row_s),
            }
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)


@dataclass(frozen=True, slots=True)
class Failures:
    """Rows of one category that failed with one type of error."""

    category: str | None  # the results' `counted_as`; None: in no category
    kind: str  # the error's type
    example: str  # the alphabetically first message
    rows: RowRanges

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{**content, "rows": tuple((begin, end) for begin, end in content["rows"])})


def failures_in(results: pa.Table) -> tuple[Failures, ...]:
    failed = results.select(["row", "error", "counted_as"]).filter(results["error"].is_valid())
    return _grouped(
        (row["counted_as"], row["error"]["type"], row["error"]["message"][:MAX_MESSAGE], row["row"])
        for row in failed.to_pylist()
    )


def renumber_failures(
    parts: Sequence[tuple[Sequence[Failures], Mapping[int, int]]],
) -> tuple[Failures, ...]:
    """Return several parts' failures together, with new row numbers looked up by the old ones.

    Rows without a new number are left out. Returns nothing if a part's record, of an earlier version, has
    none.
    """
    if not all(failures for failures, _ in parts):
        return ()
    return _grouped(
        (each.category, each.kind, each.example, numbers[row])
        for failures, numbers in parts
        for each in failures
        for row in iterate_rows(each.rows)
        if row in numbers
    )


def restrict_failures(stats: RowStats, failures: Sequence[Failures], rows: RowRanges) -> RowStats:
    """Return the stats of a part of failed rows with only these rows in its errors and categories."""
    errors: dict[str, ErrorCount] = {}
    categories = Categories()
    for each in failures:
        if not (num_rows := count(intersection(each.rows, rows))):
            continue
        errors.setdefault(each.kind, ErrorCount(0, each.example)).merge(ErrorCount(num_rows, each.example))
        if each.category is not None:
            categories.add(each.category, Category(rows=num_rows, failed=num_rows))
    return replace(stats, errors=errors, categories=categories)


def _grouped(found: Iterable[tuple[str | None, str, str, int]]) -> tuple[Failures, ...]:
    rows: dict[tuple[str | None, str], list[int]] = {}
    examples: dict[tuple[str | None, str], str] = {}
    for category, kind, message, row in found:
        rows.setdefault((category, kind), []).append(row)
        examples[category, kind] = min(message, examples.get((category, kind), message))
    return tuple(Failures(*group, examples[group], from_rows(those)) for group, those in rows.items())


def _count_results(results: pa.Table) -> RowStats:
    timed = results.filter(results["end_s"].is_valid())  # rows that killed their engines have no times
    answered = results.filter(results["error"].is_null())
    return RowStats(
        rows=results.num_rows,
        failed=results.num_rows - answered.num_rows,
        retried=int(np.count_nonzero(_ints(results["attempts"]) > 1)),
        errors=_errors(results),
        **{name: int(_ints(results[name]).sum()) for name in SUMMED},
        acceptance=_acceptance(results["acceptance_histogram"]),
        prompt_lengths=length_histogram(_ints(answered["prompt_tokens"])),
        output_lengths=length_histogram(_ints(answered["completion_tokens"])),
        categories=_categories(results),
        ignored=_ignored(results),
        stretches=RunIntervals.of(_floats(timed["begin_s"]), _floats(timed["end_s"])),
        **_sum_usage(results["engine_spent"]),
    )


def _errors(results: pa.Table) -> dict[str, ErrorCount]:
    errors: dict[str, ErrorCount] = {}
    for error in results["error"].drop_null().to_pylist():
        one = ErrorCount(1, error["message"][:MAX_MESSAGE])
        errors.setdefault(error["type"], ErrorCount(0, one.example)).merge(one)
    return errors


def _ignored(results: pa.Table) -> NameCounts:
    if "ignored" not in results.column_names:  # an earlier version's segment
        return NameCounts()
    return NameCounts.of(results["ignored"].combine_chunks().flatten().to_pylist())


def _acceptance(histograms: pa.ChunkedArray) -> list[int]:
    known = histograms.combine_chunks().drop_null()
    sizes = np.diff(known.offsets.to_numpy())
    indices = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.bincount(indices, weights=known.flatten().to_numpy()).astype(np.int64).tolist()


def _categories(results: pa.Table) -> Categories:
    named: dict[str, Category] = {}
    columns = ("counted_as", "error", "completion_tokens", "num_steps", "num_accepted_tokens")
    table = results.select(columns).filter(results["counted_as"].is_valid())
    for row in table.to_pylist():
        sums = Category(1, row["error"] is not None, *(row[name] or 0 for name in columns[2:]))
        named.setdefault(row["counted_as"], Category()).merge(sums)
    categories = Categories()
    for name, sums in named.items():
        categories.add(name, sums)
    return categories


def _sum_usage(column: pa.ChunkedArray) -> dict[str, Any]:  # Any: fields of different types follow
    by_name = zip(SPENT, column.flatten(), strict=True)
    return {name: float(_floats(values).sum()) for name, values in by_name}


def _ints(column: pa.ChunkedArray) -> Ints:
    return column.fill_null(0).to_numpy().astype(np.int64)


def _floats(column: pa.ChunkedArray) -> Floats:
    return column.fill_null(0.0).to_numpy().astype(np.float64)
