"""The input files of a batch job: finds them and their format, and checks that their rows can have a prompt.

An input is a file, a folder (its files of known formats, else those in Hive's partitions below it; no names
that begin with `.` or `_`) or a pattern (`x/*.jsonl`, `x/**/*.parquet`), on any storage. Text may be
compressed. Cheap: runs before anything starts.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from ....cluster.errors import DatasetError, RequestError
from ...checkpoints.checkpoint_paths import shipped
from .compressed_file import CODECS, CompressedFile
from .row_requests import PROMPT_COLUMNS, Record, RowSchema, parse_line, prompt_column, template_columns
from .storage import URL, Entry, Storage
from .text_records import BadTextError, TextFile, TextFormat

InputFormat = Literal["parquet", "jsonl", "csv", "tsv", "openai", "text"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
ERRORS = "_errors"  # folder of an output; readers of datasets skip names that begin with `_`
SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
# Of files that are named or in partitions: in other folders `.json` is rather a description of data.
NAMED_SUFFIXES: Mapping[str, InputFormat] = {**SUFFIXES, ".json": "jsonl"}
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # null, as Hive, Spark and DuckDB write it
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
    # columns from the names of its folders, `year=2026`, which are the same for all of its rows
    partition: tuple[tuple[str, str | int | None], ...] = ()
    # what messages name instead of the path, which a client must not see
    public_name: str | None = None

    def __str__(self) -> str:
        return self.public_name or f"{self.storage.where.rstrip('/')}/{self.name}"

    def unreadable(self, error: Exception, *, still: str = "") -> DatasetError:
        why = type(error).__name__ if self.public_name else error  # libraries' messages have the path, too
        return DatasetError(f"input: {self} cannot be read{still}: {why}.", param="input")

    @property
    def path(self) -> str:
        return self.storage.path(self.name)

    @property
    def codec(self) -> str | None:
        return CODECS.get(PurePosixPath(self.name).suffix.lower())

    def open(self) -> pa.NativeFile | CompressedFile:
        file = self.storage.reader(self.name)
        return file if self.codec is None else CompressedFile(file, self.codec)

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
            raise self.unreadable(error) from None

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
        return list(dict.fromkeys([*self._own_columns(), *self.partition_columns()]))

    def partition_columns(self) -> list[str]:
        return list(dict.fromkeys(name for file in self.files for name, _ in file.partition))

    def _own_columns(self) -> list[str]:
        if self.format == "parquet":
            return list(open_parquet(self.files[0]).schema_arrow.names)
        if self.format in ("csv", "tsv"):
            for file in self.files:
                with file.reading(), file.open_text(self.format) as text:
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
    """Find the files of a dataset, of which some ship with Manta. Raises DatasetError, ConfigError."""
    files = _with_partitions(_find_files([_own_or_shipped(str(each)) for each in where]))
    kinds: set[InputFormat | None] = {_format_of(file.name, NAMED_SUFFIXES) for file in files}
    if wanted is None and (None in kinds or len(kinds) > 1):
        found = ", ".join(sorted({Path(file.name).suffix or file.name for file in files}))
        raise _error(
            f"{', '.join(map(str, where))} holds {found}; give files of one format or --input-format."
        )
    kind = wanted or kinds.pop()
    assert kind is not None
    source = Dataset(files, kind)
    if kind == "jsonl" and ".json" in PurePosixPath(files[0].name.lower()).suffixes:
        _refuse_array(files[0])
    if kind == "jsonl" and wanted is None and _is_openai(source):
        return Dataset(files, "openai")
    return source


def check_columns(source: Dataset, row_schema: RowSchema) -> None:
    """Raise DatasetError when no row can have a prompt, ConfigError for an invalid template."""
    if row_schema.kind == "openai":
        return
    columns = source.columns()
    if (name := row_schema.id_column) in source.partition_columns():
        raise DatasetError(
            f"id_column: {name} is in the names of folders, so many rows share it. Name another.",
            param="id_column",
        )
    named = [("prompt_column", row_schema.prompt_column), ("id_column", row_schema.id_column)]
    named += [("template", name) for name in template_columns(row_schema.template or "")]
    for param, wanted in named:
        if wanted is not None and wanted not in columns:
            raise DatasetError(
                f"{param}: no column {wanted!r} in the data. It has: {', '.join(columns)}.", param=param
            )
    if row_schema.template is None and prompt_column(columns, row_schema) is None:
        if not columns:
            raise DatasetError("input: none of its first rows is a JSON object with fields.", param="input")
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


def _format_of(name: str, suffixes: Mapping[str, InputFormat]) -> InputFormat | None:
    """Return the format of a file by its name, without the suffix of a compression; None if unknown."""
    path = PurePosixPath(name.lower())
    if path.suffix not in CODECS:
        return suffixes.get(path.suffix)
    inner = suffixes.get(path.with_suffix("").suffix)
    return None if inner == "parquet" else inner  # it is compressed itself


def _with_partitions(files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Add columns of Hive's partitions, as DuckDB reads them: integers if all values of a column are."""
    found = [_partition_of(file.path) for file in files]
    texts: dict[str, set[str | None]] = {}
    for name, value in (pair for each in found for pair in each.items()):
        texts.setdefault(name, set()).add(value)
    integers = {name for name, values in texts.items() if all(map(_is_integer, values - {None}))}
    return tuple(
        replace(
            file,
            partition=tuple(
                (name, int(value) if value is not None and name in integers else value)
                for name, value in each.items()
            ),
        )
        for file, each in zip(files, found, strict=True)
    )


def _partition_of(path: str) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in PurePosixPath(path).parent.parts if _is_partition(part))
    texts = ((unquote(name), unquote(value)) for name, value in pairs)
    return {name: None if value == NO_PARTITION else value for name, value in texts}


def _is_partition(folder: str) -> bool:
    return folder.find("=") > 0


def _is_integer(text: str | None) -> bool:
    return text is not None and re.fullmatch("-?[0-9]{1,18}", text) is not None


def _refuse_array(file: SourceFile) -> None:
    with file.reading(), file.open_text("jsonl", 2**16) as text:
        _, first = next(text.lines(), (0, b""))
    if first.lstrip().startswith(b"["):
        raise _error(
            f"{file} is one JSON array, not a line for each row. Convert it: jq -c '.[]' IN > OUT.jsonl"
        )


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


def _own_or_shipped(place: str) -> str:
    path = shipped(Path(place))
    return place if path == Path(place) else str(path)  # a URL stays as it is


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
                else f"{place} has no {', '.join(SUFFIXES)} files, nor has a folder like year=2026 below it. "
                f"Files in other folders are named by a pattern: {place.rstrip('/')}/**/*.jsonl"
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
    found = _known(storage, storage.entries(), SUFFIXES)
    return found or _known(storage, _in_partitions(storage), NAMED_SUFFIXES)


def _known(
    storage: Storage, entries: Iterable[Entry], suffixes: Mapping[str, InputFormat]
) -> list[SourceFile]:
    """Return the files of known formats, without those that programs leave behind."""
    return [
        _source_file(storage, entry)
        for entry in entries
        if _format_of(entry.name, suffixes) and not PurePosixPath(entry.name).name.startswith(HIDDEN)
    ]


def _in_partitions(storage: Storage) -> list[Entry]:
    entries = storage.entries(recursive=True)
    return [entry for entry in entries if all(map(_is_partition, entry.name.split("/")[:-1]))]


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
