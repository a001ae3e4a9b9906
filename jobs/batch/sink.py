"""What a batch job writes: results gathered into part files, then `report.json`, `manifest.json`, `_SUCCESS`.

Whatever stands in the folder under its final name is whole, whoever looks and whenever. One job writes a
folder at a time, by a lock that dies with its process. Rows that could not be written are kept and tried
again. Runs in the driver; knows neither engines nor Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ...actors.batch.source import OutputFormat
from ...actors.files import TEMPORARY, write_json, write_whole
from ...cluster.errors import ConfigError, OutputError

ROWS_PER_PART = 4096
PART_INTERVAL_S = 60.0  # what a killed job loses at most
RETRY_S = 5.0  # between attempts to write what could not be written
GIVE_UP_S = 60.0  # a folder that cannot be written for so long ends the job
LOCK = ".manta-lock"
# `_SUCCESS` first: what is being removed is not complete.
OURS = ("_SUCCESS", "report.json", "manifest.json", "part-*", "errors-*", f"{TEMPORARY}*")
NOT_WRITTEN = ["row", "response", "attempts", "begin_s", "end_s"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A file to be written."""

    kind: str
    suffix: str
    num_rows: int
    write: Callable[[Path], object]


class Sink:
    """The output folder. Nothing in it is ever half-written; without `_SUCCESS` it is not complete.

    Attributes:
        folder: where the results go.
        num_rows: that are on disk.
    """

    def __init__(self, folder: Path, format: OutputFormat, *, overwrite: bool = False) -> None:
        self.num_rows = 0
        self.folder = folder
        self._format: OutputFormat = format
        self._tables: list[pa.Table] = []  # results that no part was made of yet
        self._num_gathered = 0
        self._unwritten: deque[_Part] = deque()
        self._flushed_s = time.monotonic()
        self._failing_since_s: float | None = None
        self._parts: list[dict[str, Any]] = []  # Any: JSON
        self._lock = _lock(folder)
        self._earlier = self._claim(overwrite=overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Rows that are not on disk yet."""
        return self._num_gathered + sum(part.num_rows for part in self._unwritten)

    def add(self, results: pa.Table) -> None:
        """Take results (WIRE_SCHEMA); every ROWS_PER_PART of them, or those of a minute, become a part.

        A write that fails is tried again while results come; OutputError when that does not help.
        """
        self._tables.append(results)
        self._num_gathered += results.num_rows
        now_s = time.monotonic()
        interval_s = PART_INTERVAL_S if self._failing_since_s is None else RETRY_S
        if now_s - self._flushed_s <= interval_s and self._num_gathered < ROWS_PER_PART:
            return
        try:
            self.flush()
        except OutputError:
            if now_s - (self._failing_since_s or now_s) > GIVE_UP_S:
                raise

    def flush(self) -> None:
        """Write all that is pending. Raises OutputError; what is not written stays pending."""
        self._flushed_s = time.monotonic()
        self._gather()
        while self._unwritten:
            try:
                self._write(self._unwritten[0])
            except OSError as error:
                self._failing_since_s = self._failing_since_s or self._flushed_s
                raise self._not_written(error) from error
            self._unwritten.popleft()
        self._failing_since_s = None

    def finish(self, report: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Write the last part and the papers; `_SUCCESS` comes last."""
        self.flush()
        try:
            self._remove_earlier()
            write_json(self.folder / "report.json", report)
            write_json(self.folder / "manifest.json", {**manifest, "parts": self._parts})
            write_whole(self.folder / "_SUCCESS", lambda path: path.write_bytes(b""))
        except OSError as error:
            raise self._not_written(error) from error

    def close(self) -> None:
        """Leave the folder to others. Idempotent."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()
            self._lock.close()

    def _claim(self, *, overwrite: bool) -> list[Path]:
        """An earlier job's files, which go when there is something to put in their place."""
        taken = any(path.name != LOCK for path in self.folder.iterdir())
        if taken and not overwrite:
            self.close()
            raise ConfigError(
                f"output: {self.folder} is not empty. Choose another folder, or replace its results with "
                "--overwrite.",
                param="output",
            )
        return [path for pattern in OURS for path in sorted(self.folder.glob(pattern))]

    def _remove_earlier(self) -> None:
        for path in self._earlier:
            path.unlink(missing_ok=True)
        self._earlier = []

    def _gather(self) -> None:
        """Make parts of the results; from here on a part is written once, whatever happens to the others."""
        if not self._num_gathered:
            return
        table = pa.concat_tables(self._tables)
        self._tables, self._num_gathered = [], 0
        if self._format == "openai":
            rows = table.to_pylist()
            self._plan_lines("errors", (_openai_failure(row) for row in rows if row["error"]))
            self._plan_lines("part", (_openai_success(row) for row in rows if not row["error"]))
            return
        table = table.drop_columns(NOT_WRITTEN)
        if self._format == "jsonl":
            self._plan_lines("part", table.to_pylist())
        else:
            write = _parquet_writer(table)
            self._unwritten.append(_Part("part", "parquet", table.num_rows, write))

    def _plan_lines(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        if lines:
            content = "".join(lines).encode()
            self._unwritten.append(_Part(kind, "jsonl", len(lines), lambda path: path.write_bytes(content)))

    def _write(self, part: _Part) -> None:
        name = f"{part.kind}-{len(self._parts):05d}-{uuid.uuid4().hex[:8]}.{part.suffix}"
        digest = write_whole(self.folder / name, part.write, before=self._remove_earlier)
        self._parts.append({"file": name, "rows": part.num_rows, "sha256": digest})
        self.num_rows += part.num_rows

    def _not_written(self, error: OSError) -> OutputError:
        return OutputError(
            f"output: {self.folder} cannot be written ({error.strerror or error}): {self.num_rows} rows are "
            f"on disk, {self.num_pending} could not be written. Mend the folder, and run the job "
            "again with --overwrite.",
            param="output",
        )


def _lock(folder: Path) -> IO[str]:
    """Make the folder and lock it. A lock whose file was removed meanwhile locks nothing: try again."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"output: {folder} cannot be written: {error.strerror}. Choose another folder with --output.",
                param="output",
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, file) from None
        except OSError as error:
            file.close()
            raise ConfigError(
                f"output: {folder} cannot be locked ({error.strerror}), and two jobs must not write one "
                "folder. Choose a folder on another file system.",
                param="output",
            ) from None
        if _stands_at(path, file):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
        file.close()


def _stands_at(path: Path, file: IO[str]) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _in_use(folder: Path, file: IO[str]) -> ConfigError:
    file.seek(0)
    holder = file.read().strip()
    file.close()
    return ConfigError(
        f"output: {folder} is being written by another job{f' (process {holder})' if holder else ''}. Wait "
        "for its end, or choose another folder.",
        param="output",
    )


def _parquet_writer(table: pa.Table) -> Callable[[Path], object]:
    return lambda path: pq.write_table(table, path)


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
