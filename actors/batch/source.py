"""The files of a batch job: datasets as they are found and checked, results as they are read back.

Which files, in which format, and whether any row of them can be a prompt: cheap, before anything starts. What
reads all of a dataset is `survey.py`. A place is a file, a folder (its files of known formats; not folders in
it, nor names that begin with `.` or `_`) or a pattern (`x/*.jsonl`; `x/**/*.parquet` for all folders below).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ...cluster.errors import DatasetError, RequestError
from .finding import SourceFile, find_files
from .rows import PROMPT_COLUMNS, Layout, Record, parse_line, prompt_column
from .storage import Storage
from .template import template_columns
from .text_records import BadTextError, checked_header, raw_records, split_lines

InputFormat = Literal["parquet", "jsonl", "csv", "openai", "text"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
ERRORS = "_errors"  # folder of an output; readers of datasets pass over names that begin so
SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".txt": "text",
}
PROBED_LINES = 100
CHUNK_BYTES = 4 * 2**20  # of a file read from its begin to its end: few requests to an object store
PARQUET_BUFFER_BYTES = 2**20  # per column: pages come as they are needed, not columns of a row group


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a dataset, all of one format, sorted by their paths."""

    files: tuple[SourceFile, ...]
    format: InputFormat

    @property
    def lines(self) -> bool:
        """Whether records come as unparsed lines of JSON (`Layout.lines`)."""
        return self.format in ("jsonl", "openai")

    def identity(self, digests: Sequence[Mapping[str, str]] = ()) -> list[dict[str, Any]]:  # Any: JSON
        """By what a later run sees that the input is the same.

        Args:
            digests: of each file (`Survey.digests`).
        """
        return [
            {"name": file.path, "size": file.size, "modified": file.modified_s, **digest}
            for file, digest in zip(self.files, digests or [{}] * len(self.files), strict=True)
        ]


def open_source(where: Sequence[str | Path], wanted: InputFormat | None = None) -> Source:
    """Find the files of a dataset in all places. Raises DatasetError before anything else starts."""
    files = find_files([str(each) for each in where], SUFFIXES)
    kinds: set[InputFormat | None] = {SUFFIXES.get(Path(file.name).suffix.lower()) for file in files}
    if wanted is None and (None in kinds or len(kinds) > 1):
        found = ", ".join(sorted({Path(file.name).suffix or file.name for file in files}))
        raise DatasetError(
            f"input: {', '.join(map(str, where))} holds {found}; give files of one format or --input-format.",
            param="input",
        )
    kind = wanted or kinds.pop()
    assert kind is not None
    source = Source(files, kind)
    if kind == "jsonl" and wanted is None and _is_openai(source):
        return Source(files, "openai")
    return source


def check_columns(source: Source, layout: Layout) -> None:
    """Raise DatasetError when no row can have a prompt; single bad rows are another matter.

    Raises ConfigError for a template that is none.
    """
    if layout.kind == "openai":
        return
    columns = _columns(source)
    named = [("prompt_column", layout.prompt_column), ("id_column", layout.id_column)]
    named += [("template", name) for name in template_columns(layout.template or "")]
    for param, wanted in named:
        if wanted is not None and wanted not in columns:
            raise DatasetError(
                f"{param}: no column {wanted!r} in the data. It has: {', '.join(columns)}.", param=param
            )
    if layout.template is None and prompt_column(columns, layout) is None:
        raise DatasetError(
            f"input: no column {' or '.join(PROMPT_COLUMNS)} among: {', '.join(columns)}. Name it with "
            "--prompt-column, or make a prompt of columns with --template.",
            param="prompt_column",
        )


def chunks(file: SourceFile, begin: int = 0) -> Iterator[bytes]:
    """A file to its end. Raises DatasetError when it cannot be read, or is not what it was.

    Args:
        begin: offset in bytes.
    """
    num_bytes = begin
    try:
        with file.open() as reader:
            reader.seek(begin)
            while chunk := reader.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                yield chunk
    except OSError as error:
        raise DatasetError(f"input: {file} cannot be read: {error}.", param="input") from None
    if num_bytes != file.size:
        raise has_changed(file)


def has_changed(file: SourceFile) -> DatasetError:
    return DatasetError(f"input: {file} has changed while it was read. Run the job again.", param="input")


def open_parquet(file: SourceFile) -> pq.ParquetFile:
    """Raises DatasetError when it is none, or not whole."""
    try:
        return pq.ParquetFile(file.open(), buffer_size=PARQUET_BUFFER_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"input: {file} is not a readable Parquet file: {error}.", param="input") from None


def read_results(folder: Storage | Path) -> list[dict[str, Any]]:
    """All rows of a finished job, ordered by id (tests, the demo's comparison)."""
    storage = (
        folder
        if isinstance(folder, Storage)
        else Storage.open(str(folder), field="output", follows_links=True)
    )
    rows: list[dict[str, Any]] = []
    for entry in (*storage.entries(), *storage.entries(ERRORS)):
        if entry.name.startswith(("part-", f"{ERRORS}/")):
            if entry.name.endswith(".parquet"):
                with storage.reader(entry.name) as reader:
                    rows.extend(pq.ParquetFile(reader).read().to_pylist())
            else:
                lines = storage.read(entry.name).decode("utf-8").split("\n")
                rows.extend(json.loads(line) for line in lines if line)
    return sorted(rows, key=lambda row: str(row.get("id")))


def _first_records(source: Source) -> Iterator[Record]:
    """Records among the first lines; malformed ones are passed over (they become error rows)."""
    left = PROBED_LINES
    for file in source.files:
        with contextlib.suppress(BadTextError):
            for _, line in itertools.islice(raw_records(split_lines(chunks(file)), "jsonl"), left):
                left -= 1
                with contextlib.suppress(RequestError):
                    assert isinstance(line, bytes)
                    yield parse_line(line)
        if not left:
            return


def _is_openai(source: Source) -> bool:
    first = next(_first_records(source), {})
    return "body" in first and ("url" in first or "custom_id" in first)


def _columns(source: Source) -> list[str]:
    """As far as they can be known at once."""
    if source.format == "parquet":
        return list(open_parquet(source.files[0]).schema_arrow.names)
    if source.format == "csv":
        return next((header for file in source.files if (header := csv_header(file))), [])
    if source.format == "text":
        return ["prompt"]
    return list(dict.fromkeys(name for record in _first_records(source) for name in record))


def csv_header(file: SourceFile) -> list[str]:
    """The columns of a CSV file. Raises DatasetError."""
    try:
        _, raw = next(raw_records(split_lines(chunks(file)), "csv"), (0, None))
    except BadTextError as error:
        raise bad_text(file, error) from None
    return checked_header(raw, str(file))


def bad_text(file: SourceFile, error: BadTextError) -> DatasetError:
    return DatasetError(f"input: {file}, line {line_number(file, error.offset)}: {error.why}.", param="input")


def line_number(file: SourceFile, offset: int) -> int:
    """Which line of the file a byte is in, 1-based. Reads the file up to there: for messages."""
    number = 1
    for chunk in chunks(file):
        number += chunk[:offset].count(b"\n")
        offset -= len(chunk)
        if offset <= 0:
            break
    return number
