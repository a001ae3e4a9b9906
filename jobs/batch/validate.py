"""`manta batch --validate-only`: all rows looked at as an engine would, none answered.

How long prompts are, which rows would fail and why, what in them has no effect, how many tokens the job has.
Needs the tokenizer, and no engine, no weights, no Ray. Called by the command line.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...actors.batch.reading import Row, RowReader
from ...actors.batch.rows import Layout
from ...actors.batch.source import Source
from ...actors.batch.survey import Duplicates, Survey, survey
from ...cluster.config import EngineConfig
from ...cluster.errors import RequestError
from ..tables import print_table
from .checking import PromptLengthError, RowChecker

ROWS_PER_READ = 256
BAD_ROWS_SHOWN = 10
BAR_CHARS = 40


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that would fail: its number, where it stands (file and line), and why."""

    number: int
    place: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What there is to say of a dataset before it is answered.

    Attributes:
        num_numbered: rows whose id an earlier row has, and that get a number behind it.
        num_bad: rows that would become error rows; `bad` the first of them.
        num_too_long: of these, prompts that do not fit `max_model_len`.
        lengths: of all prompts that could be read, in tokens. int64.
        max_completion_tokens: the most that all answers together can have.
        ignored: what looks like a parameter and has no effect, with the number of rows that have it.
    """

    num_files: int
    format: str
    num_rows: int
    num_numbered: int
    num_bad: int
    num_too_long: int
    bad: tuple[BadRow, ...]
    lengths: np.ndarray
    max_model_len: int
    max_completion_tokens: int
    ignored: Mapping[str, int]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.num_bad == 0


def validate(
    source: Source,
    layout: Layout,
    config: EngineConfig,
    *,
    duplicates: Duplicates,
    stop: Callable[[], bool] = lambda: False,
) -> ValidationReport:
    """Look at every row. Raises what a job would before it starts: DatasetError, ConfigError.

    Args:
        duplicates, stop: of the survey.
    """
    begin_s = time.monotonic()
    checker = RowChecker(layout, config)
    rows = survey(source, layout, duplicates=duplicates, stop=stop)
    lengths: array[int] = array("q")
    bad: list[tuple[int, str]] = []
    num_bad = num_too_long = most = 0
    ignored: Counter[str] = Counter()
    for row in all_rows(source, layout, rows):
        try:
            ignored.update(checker.ignored(row))
            checked = checker.check(row)
            lengths.append(checked.num_prompt_tokens)
            most += checked.max_completion_tokens
            continue
        except PromptLengthError as error:
            lengths.append(error.num_tokens)
            num_too_long += 1
            why = error.message
        except RequestError as error:
            why = error.message
        num_bad += 1
        if len(bad) < BAD_ROWS_SHOWN:
            bad.append((row.number, why))
    return ValidationReport(
        num_files=len(source.files),
        format=source.format,
        num_rows=rows.num_rows,
        num_numbered=len(rows.numbered.rows),
        num_bad=num_bad,
        num_too_long=num_too_long,
        bad=tuple(BadRow(number, rows.place(number, source), why) for number, why in bad),
        lengths=np.array(lengths, np.int64),
        max_model_len=checker.max_model_len,
        max_completion_tokens=most,
        ignored=dict(ignored),
        seconds=time.monotonic() - begin_s,
    )


def all_rows(source: Source, layout: Layout, rows: Survey) -> Iterator[Row]:
    """Every row, in order."""
    reader = RowReader(source, layout)
    try:
        for begin in range(0, rows.num_rows, ROWS_PER_READ):
            yield from reader.read(rows.work(((begin, min(begin + ROWS_PER_READ, rows.num_rows)),)))
    finally:
        reader.close()


def print_validation(report: ValidationReport) -> None:
    """The report on standard output."""
    total = int(report.lengths[report.lengths < report.max_model_len].sum())
    print_table(
        f"{report.num_files} file(s) of {report.format}, read in {report.seconds:.1f} s",
        ["rows", "bad", "too long", "ids numbered", "tokens in", "tokens out at most"],
        [
            [
                str(report.num_rows),
                str(report.num_bad),
                str(report.num_too_long),
                str(report.num_numbered),
                str(total),
                str(report.max_completion_tokens),
            ]
        ],
        num_left=0,
    )
    if len(report.lengths):
        print_table(
            f"prompts in tokens: {_summary(report.lengths)}; prompt and answer together: at most "
            f"{report.max_model_len}",
            ["tokens", "", "rows"],
            histogram(report.lengths),
            num_left=2,
        )
    if report.ignored:
        print_table(
            "parameters that have no effect",
            ["name", "rows"],
            [[name, str(count)] for name, count in report.ignored.items()],
        )
    if report.bad:
        print_table(
            f"rows that would fail: {report.num_bad}"
            + (f", the first {len(report.bad)}" if report.num_bad > len(report.bad) else ""),
            ["row", "where", "why"],
            [[str(row.number), row.place, row.why] for row in report.bad],
            num_left=3,
        )


def histogram(lengths: np.ndarray) -> list[list[str]]:
    """Rows of a table: a range of lengths whose ends are powers of two, a bar, how many have it."""
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins)
    first = int(bins.min())
    return [
        [
            f"{2**i} to {2 ** (i + 1) - 1}",
            "█" * -(-BAR_CHARS * int(counts[i]) // int(counts.max())),
            str(counts[i]),
        ]
        for i in range(first, len(counts))
    ]


def _summary(lengths: np.ndarray) -> str:
    middle, high = np.percentile(lengths, (50, 95)).astype(int)
    return f"{lengths.min()} to {lengths.max()}, median {middle}, 95th percentile {high}"
