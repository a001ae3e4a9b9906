"""The input files of a batch job: finds them and their format, and checks that their rows can have a prompt.

An input is a file, a folder (its files of known formats; no subfolders, no names that begin with `.` or `_`)
or a pattern (`x/*.jsonl`, `x/**/*.parquet`), on any storage. Cheap: runs before anything starts.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ....cluster.errors import DatasetError, RequestError
from .row_requests import PROMPT_COLUMNS, Record, RowSchema, parse_line, prompt_column, template_columns
from .storage import URL, Entry, Storage
from .text_records import BadTextError, TextFile, TextFormat

InputFormat = Literal["parquet", "jsonl", "csv", "openai", "text"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
ERRORS = "_errors"  # folder of an output; readers of datasets skip names that begin with `_`
SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".txt": "text",
}
HIDDEN = (".", "_")  # files that programs leave next to data: _SUCCESS, .crc
PROBED_LINES = 100
READ_BYTES = 4 * 2**20  # per read of a whole file: few requests to an object store
PARQUET_BUFFER_BYTES = 2**20  # per column: pages are read as they are needed, not whole row groups


@dataclass(frozen=True, slots=True)
class SourceFile:
    storage: Storage
    name: str
    size: int
    modified_s: float

    def __str__(self) -> str:
        return f"{self.storage.where.rstrip('/')}/{self.name}"

    @property
    def path(self) -> str:
        return self.storage.path(self.name)

    def open(self) -> pa.NativeFile:
        return self.storage.reader(self.name)

    def open_text(self, format: TextFormat, buffer_bytes: int = READ_BYTES) -> TextFile:
        return TextFile(self.open(), format, buffer_bytes)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Convert errors while the file is read into DatasetError, which names file and line."""
        try:
            yield
        except BadTextError as error:
            line = f"line {self.line_number(error.offset)}"
            raise DatasetError(f"input: {self}, {line}: {error.why}.", param="input") from None
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"input: {self} cannot be read: {error}.", param="input") from None

    def chunks(self) -> Iterator[bytes]:
        with self.reading(), self.open() as reader:
            while chunk := reader.read(READ_BYTES):
                yield chunk

    def line_number(self, offset: int) -> int:
        """Return the 1-based line of a byte offset. Reads the file up to there; for messages only."""
        number = 1
        for chunk in self.chunks():
            number += chunk[:offset].count(b"\n")
            offset -= len(chunk)
            if offset <= 0:
                break
        return number

    def changed(self) -> DatasetError:
        return DatasetError(f"input: {self} has changed while it was read. Run the job again.", param="input")


@dataclass(frozen=True, slots=True)
class Dataset:
    """The files of a dataset, all of one format, sorted by path."""

    files: tuple[SourceFile, ...]
    format: InputFormat

    @property
    def lines(self) -> bool:
        return self.format in ("jsonl", "openai")

    def columns(self) -> list[str]:
        """Return the columns that can be known without reading all rows. Reads the beginning of files."""
        if self.format == "parquet":
            return list(open_parquet(self.files[0]).schema_arrow.names)
        if self.format == "csv":
            for file in self.files:
                with file.reading(), file.open_text("csv") as text:
                    if text.header:
                        return text.header
            return []
        if self.format == "text":
            return ["prompt"]
        return list(dict.fromkeys(name for record in _first_records(self) for name in record))

    def identity(self, digests: Sequence[Mapping[str, str]] = ()) -> list[dict[str, Any]]:  # Any: JSON
        """Return what a later run recognizes the input by. `digests`: of each file (`RowIndex.digests`)."""
        return [
            {"name": file.path, "size": file.size, "modified": file.modified_s, **digest}
            for file, digest in zip(self.files, digests or [{}] * len(self.files), strict=True)
        ]


def open_source(where: Sequence[str | Path], wanted: InputFormat | None = None) -> Dataset:
    """Find the files of a dataset. Raises DatasetError, ConfigError."""
    files = _find_files([str(each) for each in where])
    kinds: set[InputFormat | None] = {SUFFIXES.get(Path(file.name).suffix.lower()) for file in files}
    if wanted is None and (None in kinds or len(kinds) > 1):
        found = ", ".join(sorted({Path(file.name).suffix or file.name for file in files}))
        raise _error(
            f"{', '.join(map(str, where))} holds {found}; give files of one format or --input-format."
        )
    kind = wanted or kinds.pop()
    assert kind is not None
    source = Dataset(files, kind)
    if kind == "jsonl" and wanted is None and _is_openai(source):
        return Dataset(files, "openai")
    return source


def check_columns(source: Dataset, layout: RowSchema) -> None:
    """Raise DatasetError when no row can have a prompt, ConfigError for an invalid template."""
    if layout.kind == "openai":
        return
    columns = source.columns()
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


def open_parquet(file: SourceFile) -> pq.ParquetFile:
    """Open a Parquet file. Raises DatasetError if it is not one, or incomplete."""
    try:
        return pq.ParquetFile(file.open(), buffer_size=PARQUET_BUFFER_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise _error(f"{file} is not a readable Parquet file: {error}.") from None


def _first_records(source: Dataset) -> Iterator[Record]:
    left = PROBED_LINES
    for file in source.files:
        with file.reading(), contextlib.suppress(BadTextError), file.open_text("jsonl") as text:
            for _, line in itertools.islice(text.raw_records(), left):
                left -= 1
                with contextlib.suppress(RequestError):
                    assert isinstance(line, bytes)
                    yield parse_line(line)
        if not left:
            return


def _is_openai(source: Dataset) -> bool:
    first = next(_first_records(source), {})
    return "body" in first and ("url" in first or "custom_id" in first)


def _find_files(where: Sequence[str]) -> tuple[SourceFile, ...]:
    found: dict[str, SourceFile] = {}
    for each in where:
        folder, pattern = _split_pattern(each)
        storage = Storage.open(folder, field="input", follows_links=True)
        place = f"{storage.where.rstrip('/')}/{pattern}" if pattern else storage.where
        try:
            files = _matching(storage, pattern.split("/")) if pattern else _in_place(storage)
        except OSError as error:
            raise _error(f"{place} cannot be read: {error}.") from None
        if not files:
            raise _error(
                f"no file matches {place}."
                if pattern
                else f"{place} has no {', '.join(SUFFIXES)} files. Files in folders below it are named by a "
                f"pattern: {place.rstrip('/')}/**/*.jsonl"
            )
        found |= {f"{file.storage.filesystem.type_name}:{file.path}": file for file in files}
    return tuple(found[key] for key in sorted(found))


def _matching(storage: Storage, pattern: Sequence[str]) -> list[SourceFile]:
    entries = storage.entries(recursive=len(pattern) > 1)
    return [_source_file(storage, entry) for entry in entries if _matches(entry.name.split("/"), pattern)]


def _in_place(storage: Storage) -> list[SourceFile]:
    kind = storage.kind
    if kind is None:
        raise _error(f"{storage.where} cannot be read: there is no such file or folder.")
    if kind == "file":
        if storage.local:
            storage.filesystem.open_input_file(storage.root).close()  # raises now, before engines start
        entry = storage.parent.entry(storage.name)
        return [_source_file(storage.parent, entry)] if entry is not None else []
    return [
        _source_file(storage, entry)
        for entry in storage.entries()
        if PurePosixPath(entry.name).suffix.lower() in SUFFIXES and not entry.name.startswith(HIDDEN)
    ]


def _source_file(storage: Storage, entry: Entry) -> SourceFile:
    return SourceFile(storage, entry.name, entry.size, entry.modified_s)


def _error(why: str) -> DatasetError:
    return DatasetError(f"input: {why}", param="input")


def _split_pattern(where: str) -> tuple[str, str]:
    """Return the folder before a pattern, and the pattern; a plain name has an empty pattern."""
    url = URL.match(where)
    path, query = where, ""
    if url is not None and url[1] != "file":
        path, mark, rest = where.partition("?")
        query = mark + rest
    elif Path(where[len(url[0]) :] if url else where).exists():
        return where, ""
    parts = path.split("/")
    special = re.compile(r"[*\[]" if url else r"[*?\[]")  # `?` in a URL begins its query
    first = next((place for place, part in enumerate(parts) if special.search(part)), None)
    if first is None:
        return where, ""
    folder = "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")
    return folder + query, "/".join(parts[first:])


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a name match those of a pattern; `**` is any number of folders."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        folders = itertools.takewhile(lambda part: not part.startswith(HIDDEN), name[:-1])
        return any(_matches(name[skip:], pattern[1:]) for skip in range(len(list(folders)) + 1))
    if not name or not fnmatchcase(name[0], pattern[0]):
        return False
    if name[0].startswith(HIDDEN) and not pattern[0].startswith(HIDDEN):
        return False
    return _matches(name[1:], pattern[1:])
