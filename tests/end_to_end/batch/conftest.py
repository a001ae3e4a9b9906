"""What tests of batch jobs share: jobs over an executor that only sleeps, and processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.jobs.chaos_job import ChaosJob, MakeJob, write_rows
from support.jobs.job_process import JobProcess, StartJob


@pytest.fixture
def make_job(pair: tuple[Path, Path], tmp_path: Path) -> MakeJob:
    """Make a job of some rows, or of a given file, in the test's folder."""

    def make(rows: int | Path, killers: tuple[int, ...] = (), **changes: Any) -> ChaosJob:
        source = tmp_path / "rows.jsonl" if isinstance(rows, int) else rows
        if isinstance(rows, int):
            write_rows(source, rows, killers)
        return ChaosJob(model=str(pair[0]), input=str(source), folder=str(tmp_path), **changes)

    return make


@pytest.fixture
def start_job() -> Iterator[StartJob]:
    """Start commands as processes, which are ended with the test: `start_job(command, log, address)`."""
    started: list[JobProcess] = []

    def start(command: Sequence[str], log: Path, address: str | None = None) -> JobProcess:
        started.append(JobProcess(command, log, address))
        return started[-1]

    yield start
    for job in started:
        job.close()


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[[Iterable[Mapping[str, Any] | str]], Path]:
    """Write rows of JSON, and lines as they are, to a file of the test's folder."""

    def write(rows: Iterable[Mapping[str, Any] | str]) -> Path:
        path = tmp_path / "lines.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return path

    return write
