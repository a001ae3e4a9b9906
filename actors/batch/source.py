"""The files of a batch job: datasets as they are found and checked, results as they are read back.

Which files, in which format, how many rows, and the spans that engines read (`reading.py`); and the one
way to put a file in place whole. What a job writes is `sink.py`. Runs in the driver; knows no engine.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ...cluster.errors import ConfigError, DatasetError, RequestError
from .reading import Span, line_spans, parquet_spans
from .rows import PROMPT_COLUMNS, Layout, parse_line, prompt_column

InputFormat = Literal["parquet", "jsonl", "openai"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
PROBED_LINES = 100
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib makes one slash of two


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a dataset, all of one format."""

    files: tuple[Path, ...]
    format: InputFormat
    num_rows: int

    @property
    def lines(self) -> bool:
        return self.format != "parquet"

    def spans(self, rows_per_span: int) -> Iterator[Span]:
        """All rows, in spans that engines can read wherever they are."""
        for file in self.files:
            yield from (line_spans if self.lines else parquet_spans)(file.resolve(), rows_per_span)


def local_path(where: str | Path, field: str) -> Path:
    """The path; a URL is refused, as no job reads or writes one."""
    if found := URL.match(str(where)):
        kind = DatasetError if field == "input" else ConfigError
        raise kind(
            f"{field}: {where} is a URL ({found[1]}), and batch jobs read and write folders only. Give a "
            "path that all nodes see: mount the bucket, or copy from and to it.",
            param=field,
        )
    return Path(where)


def open_source(path: Path, wanted: InputFormat | None = None) -> Source:
    """Find and check the files of a dataset. Raises DatasetError before anything else starts."""
    files = _files(path)
    kinds: set[InputFormat | None] = {SUFFIXES.get(file.suffix.lower()) for file in files}
    if wanted is None and (None in kinds or len(kinds) > 1):
        found = ", ".join(sorted({file.suffix or file.name for file in files}))
        raise DatasetError(
            f"input: {path} holds {found}; give files of one format or --input-format.",
            param="input",
        )
    kind = wanted or kinds.pop()
    assert kind is not None
    if kind == "parquet":
        num_rows = sum(_count_parquet(file) for file in files)
    else:
        num_rows = sum(_count_lines(file) for file in files)
    if num_rows == 0:
        raise DatasetError(f"input: {path} holds no rows.", param="input")
    if kind == "jsonl" and wanted is None and _is_openai(files[0]):
        kind = "openai"
    return Source(files, kind, num_rows)


def check_columns(source: Source, layout: Layout) -> None:
    """Raise DatasetError when no row can have a prompt; single bad rows are another matter."""
    if layout.kind == "openai":
        return
    columns = _columns(source)
    for name, wanted in (("prompt_column", layout.prompt_column), ("id_column", layout.id_column)):
        if wanted is not None and wanted not in columns:
            raise DatasetError(
                f"{name}={wanted!r} is not in the data. It has: {', '.join(columns)}.", param=name
            )
    if prompt_column(columns, layout) is None:
        raise DatasetError(
            f"input: no column {' or '.join(PROMPT_COLUMNS)} among: {', '.join(columns)}. Name it with "
            "--prompt-column.",
            param="prompt_column",
        )


def _files(path: Path) -> tuple[Path, ...]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        else:
            with path.open("rb"):
                files = [path]
    except OSError as error:
        raise DatasetError(f"input: {path} cannot be read: {error.strerror}.", param="input") from None
    if not files:
        raise DatasetError(f"input: {path} has no {', '.join(SUFFIXES)} files.", param="input")
    return tuple(files)


def _count_parquet(file: Path) -> int:
    try:
        return pq.ParquetFile(file).metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"input: {file} is not a readable Parquet file: {error}.", param="input") from None


def _count_lines(file: Path) -> int:
    try:
        with file.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines if line.decode("utf-8"))
    except OSError as error:
        raise DatasetError(f"input: {file} cannot be read: {error.strerror}.", param="input") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"input: {file} is not UTF-8 text: {error}.", param="input") from None


def _first_records(file: Path) -> Iterator[Mapping[str, Any]]:
    """Records among the first lines; malformed ones are passed over (they become error rows)."""
    with file.open(encoding="utf-8") as lines:
        for _, line in zip(range(PROBED_LINES), lines, strict=False):
            with contextlib.suppress(RequestError):
                yield parse_line(line)


def _is_openai(file: Path) -> bool:
    first = next(_first_records(file), {})
    return "body" in first and ("url" in first or "custom_id" in first)


def _columns(source: Source) -> list[str]:
    if not source.lines:
        return list(pq.ParquetFile(source.files[0]).schema_arrow.names)
    return list(dict.fromkeys(name for record in _first_records(source.files[0]) for name in record))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All rows of a finished job, ordered by id (tests, the demo's comparison)."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*-*.parquet")):
        rows.extend(pq.read_table(path).to_pylist())
    for path in sorted(folder.glob("*-*.jsonl")):
        rows.extend(json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return sorted(rows, key=lambda row: str(row.get("id")))
