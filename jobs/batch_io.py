"""What a batch job reads and writes: datasets in, parts out.

Reading: which files, in which format, how many rows, and the Ray dataset of their records. Writing: results
are gathered into part files, each written under a temporary name and renamed when it is complete; then come
`report.json`, `manifest.json` and, last, `_SUCCESS`. Runs in the driver; knows no engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ..cluster.errors import ConfigError, DatasetError, RequestError
from .batch_rows import PROMPT_COLUMNS, Layout, parse_line, prompt_column

if TYPE_CHECKING:
    import ray.data

InputFormat = Literal["parquet", "jsonl", "openai"]
OutputFormat = Literal["parquet", "jsonl", "openai"]
SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
ROWS_PER_PART = 4096
PART_INTERVAL_S = 60.0  # what a killed job loses at most
PROBED_LINES = 100
OURS = ("part-*", "errors-*", ".tmp-*", "_SUCCESS", "manifest.json", "report.json")


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a dataset, all of one format."""

    files: tuple[Path, ...]
    format: InputFormat
    num_rows: int

    @property
    def lines(self) -> bool:
        return self.format != "parquet"

    def read(self, num_blocks: int) -> ray.data.Dataset:
        """Its records. Reading claims no CPU: the engines may own them all."""
        import ray.data

        paths = [str(path.resolve()) for path in self.files]
        if self.lines:
            return ray.data.read_text(paths, override_num_blocks=num_blocks, num_cpus=0)
        # Neither suffixes nor `key=value` folders mean anything: the files were chosen already.
        return ray.data.read_parquet(
            paths, override_num_blocks=num_blocks, num_cpus=0, file_extensions=None, partitioning=None
        )


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
        with file.open(encoding="utf-8") as lines:
            return sum(1 for line in lines if line.strip())
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


class Sink:
    """The output folder. Nothing in it is ever half-written; without `_SUCCESS` it is not complete."""

    def __init__(self, folder: Path, format: OutputFormat, *, overwrite: bool = False) -> None:
        self._folder = folder
        self._format: OutputFormat = format
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._flushed_s = time.monotonic()
        self._parts: list[dict[str, Any]] = []  # Any: JSON
        _claim(folder, overwrite=overwrite)

    def add(self, results: pa.Table) -> None:
        """Take results (WIRE_SCHEMA); every ROWS_PER_PART of them, or those of a minute, become a part."""
        self._pending.append(results)
        self._num_pending += results.num_rows
        if self._num_pending >= ROWS_PER_PART or time.monotonic() - self._flushed_s > PART_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a part."""
        self._flushed_s = time.monotonic()
        if not self._num_pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending, self._num_pending = [], 0
        if self._format == "openai":
            rows = table.to_pylist()
            self._write_lines("errors", (_openai_failure(row) for row in rows if row["error"]))
            self._write_lines("part", (_openai_success(row) for row in rows if not row["error"]))
            return
        table = table.drop_columns(["response", "begin_s", "end_s"])
        if self._format == "jsonl":
            self._write_lines("part", table.to_pylist())
        else:
            self._write("part", "parquet", table.num_rows, lambda path: pq.write_table(table, path))

    def finish(self, report: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Write the last part and the papers; `_SUCCESS` comes last."""
        self.flush()
        write_json(self._folder / "report.json", report)
        write_json(self._folder / "manifest.json", {**manifest, "parts": self._parts})
        _replace(self._folder / "_SUCCESS", lambda path: path.write_bytes(b""))

    def _write_lines(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        if lines:
            self._write(
                kind, "jsonl", len(lines), lambda path: path.write_text("".join(lines), encoding="utf-8")
            )

    def _write(self, kind: str, suffix: str, num_rows: int, write: Any) -> None:  # Any: returns what it likes
        path = self._folder / f"{kind}-{len(self._parts):05d}-{uuid.uuid4().hex[:8]}.{suffix}"
        _replace(path, write)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._parts.append({"file": path.name, "rows": num_rows, "sha256": digest})


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All rows of a finished job, ordered by id (tests, the demo's comparison)."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*-*.parquet")):
        rows.extend(pq.read_table(path).to_pylist())
    for path in sorted(folder.glob("*-*.jsonl")):
        rows.extend(json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return sorted(rows, key=lambda row: str(row.get("id")))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    _replace(path, lambda target: target.write_text(text, encoding="utf-8"))


def _claim(folder: Path, *, overwrite: bool) -> None:
    """Make the folder; an earlier job's files go only when asked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be made: {error.strerror}.", param="output") from None
    if taken and not overwrite:
        raise ConfigError(
            f"output: {folder} is not empty. Choose another folder, or replace its results with --overwrite.",
            param="output",
        )
    for pattern in OURS:
        for path in folder.glob(pattern):
            path.unlink()


def _replace(path: Path, write: Any) -> None:  # Any: a callable that returns what it likes
    """Write under a temporary name, make it durable, and give it its name."""
    temporary = path.with_name(f".tmp-{path.name}")
    write(temporary)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path)


def _openai_success(row: Mapping[str, Any]) -> dict[str, Any]:
    body = json.loads(row["response"])
    return {
        "id": f"batch_req_{uuid.uuid4().hex[:24]}",
        "custom_id": row["id"],
        "response": {"status_code": 200, "request_id": body["id"], "body": body},
        "error": None,
    }


def _openai_failure(row: Mapping[str, Any]) -> dict[str, Any]:
    error = row["error"]
    return {
        "id": f"batch_req_{uuid.uuid4().hex[:24]}",
        "custom_id": row["id"],
        "response": None,
        "error": {"code": error["type"], **error},
        "input": row["input"],
    }
