"""Records in small files under `_manta/` which job an output belongs to and which of its runs may write.

    job.json      the job's spec and its runs; this file makes the output the job's
    run.json      the run that may make parts, or none; a writer reads it before each part
    earlier.json  results of an earlier job, to be removed when there are new ones

Written by the holder of the output's lock (`ledger.py`), read by writers.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from ....cluster.errors import OutputError
from ....cluster.safe_file_names import inner_name
from ..dataset.storage import Storage
from .job_spec import JobSpec
from .output_parts import FOLDER, RESULT_NAME, SUCCESS, Json

JOB, RUN, EARLIER = f"{FOLDER}/job.json", f"{FOLDER}/run.json", f"{FOLDER}/earlier.json"
VERSION = 3  # of the layout of an output


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    first_run: int  # of this job; earlier runs were another job's
    numbering: int  # row numbers written before this run refer to an input that has changed since
    runs: tuple[Mapping[str, Any], ...]  # one entry per run, in order
    spec: Mapping[str, Any]

    @property
    def run(self) -> int:
        return self.runs[-1]["run"]

    @classmethod
    def read(cls, output: Storage) -> Self | None:
        """Return the job of an output, if any. Raises OSError, ValueError."""
        try:
            job = json.loads(output.read(JOB))
        except FileNotFoundError:
            return None
        if job.get("version") != VERSION:
            raise ValueError(f"version {job.get('version')!r} of {JOB}, but this Manta supports {VERSION}")
        return cls(
            first_run=job["first_run"],
            numbering=job["numbering"],
            runs=tuple(job["runs"]),
            spec=job["spec"],
        )

    @classmethod
    def first(cls, spec: JobSpec, before: JobRun | None) -> Self:
        run = before.run + 1 if before else 1
        return cls(first_run=run, numbering=run, runs=(_run(run),), spec=spec.to_json())

    def next(self, spec: JobSpec, *, renumbered: bool) -> JobRun:
        run = self.run + 1
        return replace(
            self,
            numbering=run if renumbered else self.numbering,
            runs=(*self.runs, _run(run)),
            spec=spec.to_json(),
        )

    def as_json(self) -> Json:
        return {"runs": self.runs, **self.spec}

    def write(self, output: Storage) -> None:
        write_json(output, JOB, {"version": VERSION, **asdict(self)})


def allow_writes(output: Storage, run: int | None) -> None:
    """Allow only this run to make parts; None: no run."""
    write_json(output, RUN, {"run": run})


def check_run(output: Storage, run: int) -> None:
    """Raise OutputError if another run has replaced this one or the job has ended."""
    current = _read(output, RUN, {"run": run})["run"]
    if current != run:
        now = "it has ended" if current is None else f"run {current} writes it now"
        raise OutputError(
            f"output: {output.where} is not written by run {run} any more: {now}. What this run has answered "
            "meanwhile is answered there.",
            param="output",
        )


def keep_earlier(output: Storage, run: int, names: list[str]) -> None:
    write_json(output, EARLIER, {"run": run, "names": names})


def earlier(output: Storage, first_run: int) -> tuple[str, ...]:
    run, names = _earlier(output)
    return names if run == first_run else ()


def forget_earlier(output: Storage) -> None:
    output.remove(EARLIER)


def remove_earlier(output: Storage) -> None:
    """Remove the results of the earlier job, because new ones are about to be written."""
    _, names = _earlier(output)
    if names:
        output.remove(SUCCESS, *names)
        output.remove(EARLIER)


def write_json(output: Storage, name: str, content: Mapping[str, Any]) -> None:
    output.write(name, (json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n").encode())


def reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _read(output: Storage, name: str, absent: Json) -> Json:
    try:
        return json.loads(output.read(name))
    except FileNotFoundError:
        return absent


def _earlier(output: Storage) -> tuple[int, tuple[str, ...]]:
    """Return the run that replaces results, and their names. Raises OutputError for other files' names."""
    noted = _read(output, EARLIER, {"run": 0, "names": []})
    try:
        return int(noted["run"]), tuple(inner_name(name, RESULT_NAME) for name in noted["names"])
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"output: {EARLIER} in {output.where} does not list results of a job ({reason(error)}). "
            "Remove it, and run the same command again.",
            param="output",
        ) from None


def _run(run: int) -> Json:
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {"run": run, "began": began, "host": socket.gethostname(), "pid": os.getpid()}
