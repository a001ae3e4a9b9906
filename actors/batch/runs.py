"""Which job an output belongs to, and which run of it may write: the small papers under `_manta/`.

    job.json      the job's paper and its runs; its appearance makes the output this job's
    run.json      the run that may make parts, or none: what a writer looks at before each part
    earlier.json  results of an earlier job that go when there is something to put in their place

Written by whoever holds the output's lock (`ledger.py`), read by writers.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from ...cluster.errors import OutputError
from ...cluster.inner_names import inner_name
from .paper import JobPaper
from .parts import FOLDER, RESULT_NAME, SUCCESS, Json
from .storage import Storage

JOB, RUN, EARLIER = f"{FOLDER}/job.json", f"{FOLDER}/run.json", f"{FOLDER}/earlier.json"
VERSION = 2  # 1 put failed rows and papers beside the answered rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `job.json` says.

    Attributes:
        first_run: what earlier runs wrote is another job's.
        numbering: row numbers of earlier runs are meant for an input that has changed since.
        runs: one entry each, in order.
        paper: `JobPaper.as_json`.
    """

    first_run: int
    numbering: int
    runs: tuple[Mapping[str, Any], ...]
    paper: Mapping[str, Any]

    @property
    def run(self) -> int:
        """The latest."""
        return self.runs[-1]["run"]

    @classmethod
    def read(cls, output: Storage) -> Self | None:
        """The job of an output, if it has one. Raises OSError, ValueError."""
        try:
            job = json.loads(output.read(JOB))
        except FileNotFoundError:
            return None
        if job.get("version") not in (1, VERSION):
            raise ValueError(f"version {job.get('version')!r} of {JOB}, where this Manta knows {VERSION}")
        return cls(
            first_run=job["first_run"],
            numbering=job["numbering"],
            runs=tuple(job["runs"]),
            paper=job["paper"],
        )

    @classmethod
    def first(cls, paper: JobPaper, before: Job | None) -> Self:
        """A job that begins with its first run, in the place of another if there was one."""
        run = before.run + 1 if before else 1
        return cls(first_run=run, numbering=run, runs=(_run(run),), paper=paper.as_json())

    def next(self, paper: JobPaper, *, renumbered: bool) -> Job:
        """The job with one more run."""
        run = self.run + 1
        return replace(
            self,
            numbering=run if renumbered else self.numbering,
            runs=(*self.runs, _run(run)),
            paper=paper.as_json(),
        )

    def as_json(self) -> Json:
        """For readers: the paper, and who made the results when."""
        return {"runs": self.runs, **self.paper}

    def write(self, output: Storage) -> None:
        content = {
            "version": VERSION,
            "first_run": self.first_run,
            "numbering": self.numbering,
            "runs": self.runs,
            "paper": self.paper,
        }
        write_json(output, JOB, content)


def let_write(output: Storage, run: int | None) -> None:
    """From here on this run alone makes parts; None: no run does."""
    write_json(output, RUN, {"run": run})


def check_run(output: Storage, run: int) -> None:
    """Raise OutputError when the job has gone on without this run."""
    current = _read(output, RUN, {"run": run})["run"]
    if current != run:
        now = "it has ended" if current is None else f"run {current} writes it now"
        raise OutputError(
            f"output: {output.where} is not written by run {run} any more: {now}. What this run has answered "
            "meanwhile is answered there.",
            param="output",
        )


def keep_earlier(output: Storage, run: int, names: list[str]) -> None:
    """Note what a run replaces."""
    write_json(output, EARLIER, {"run": run, "names": names})


def earlier(output: Storage, first_run: int) -> tuple[str, ...]:
    """What still stands of the results that the job replaces."""
    run, names = _earlier(output)
    return names if run == first_run else ()


def forget_earlier(output: Storage) -> None:
    """What was noted is not to be replaced after all."""
    output.remove(EARLIER)


def remove_earlier(output: Storage) -> None:
    """Something is about to stand in the place of an earlier job's results."""
    _, names = _earlier(output)
    if names:
        output.remove(SUCCESS, *names)
        output.remove(EARLIER)


def write_json(output: Storage, name: str, content: Mapping[str, Any]) -> None:
    output.write(name, (json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n").encode())


def reason(error: BaseException) -> str:
    """An error of a file system in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _read(output: Storage, name: str, absent: Json) -> Json:
    try:
        return json.loads(output.read(name))
    except FileNotFoundError:
        return absent


def _earlier(output: Storage) -> tuple[int, tuple[str, ...]]:
    """The run that replaces results, and their names. Raises OutputError where other files are named."""
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
