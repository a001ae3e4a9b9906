"""The ledger of an output: which job owns it, which rows are done, and the end of the job.

    open    lock the output; resume its job, begin a new one, or raise what prevents it
    ...     engines write (`row_writer.py`); `refresh` reads what they have made durable
    finish  every row once (`compaction.py`), then manifest, report and, last, `_SUCCESS`

Held by the process that drives a job: the driver of `manta batch`, or the replica that runs a batch of
`/v1/batches`. All its state is in the output. Engines write without it.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from ....cluster.batch.row_ranges import RowRanges, count, difference, union
from ....cluster.errors import ConfigError, OutputError
from ...system.atomic_files import TEMPORARY
from ..dataset.source import ERRORS
from ..dataset.storage import Storage
from ..row_stats import Device, RowStats
from .compaction import compact, manifest, manifest_parts, renumber
from .job_runs import (
    JobRun,
    allow_writes,
    earlier,
    forget_earlier,
    keep_earlier,
    reason,
    remove_earlier,
    write_json,
)
from .job_spec import JobSpec, check_parts, not_empty
from .output_index import OutputIndex, results_in
from .output_lock import Lock, lock
from .output_parts import FOLDER, MANIFEST, PENDING, RECORDS, REPORT, RESULT_NAME, SUCCESS
from .row_writer import GIVE_UP_S, RETRY_S, RowWriter

# Raised by job files and records that are damaged or cannot be read.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException)

Resume = Literal["yes", "no", "force"]


class Ledger:
    """An output that this process may write. Created by `open`."""

    def __init__(self, output: Storage, spec: JobSpec, lock: Lock) -> None:
        self.run = 0  # the number of this run, for writers
        self.complete = False  # all rows are done and no run was begun; `reopen` begins one
        self._output = output
        self._spec = spec
        self._lock = lock
        self._index = OutputIndex(output, first_run=0, numbering=0)
        self._job: JobRun | None = None

    @classmethod
    def open(
        cls,
        output: Storage,
        spec: JobSpec,
        *,
        resume: Resume = "yes",
        overwrite: bool = False,
        id_hashes: Callable[[], np.ndarray] | None = None,
        say: Callable[[str], object] = lambda words: None,
        held_lock: Lock | None = None,
    ) -> Self:
        """Open an output for a new job, or for one more run of its job.

        Args:
            resume: "no" rejects an output that is not empty; "force" resumes despite other settings or input.
            overwrite: begin a new job; earlier results stay until there are new ones.
            id_hashes: `RowIndex.id_hashes`, by which rows of a changed input are found again.
            say: called with a line for the user about a long wait.
            held_lock: the output's lock, if taken before; the ledger closes it, unless this raises.

        Raises ConfigError, which names what prevents it and the remedy.
        """
        ledger = cls(output, spec, held_lock or lock(output, say))
        try:
            ledger._begin(resume, overwrite, id_hashes)
        except UNREADABLE as error:
            if held_lock is None:
                ledger.close()
            raise ConfigError(
                f"output: {output.where} cannot be used ({reason(error)}). Fix it, choose another with "
                "--output, or replace it with --overwrite.",
                param="output",
            ) from error
        except BaseException:
            if held_lock is None:
                ledger.close()
            raise
        return ledger

    @property
    def answered(self) -> RowRanges:
        return self._index.answered

    @property
    def failed(self) -> RowRanges:
        return self._index.failed

    @property
    def unanswered(self) -> RowRanges:
        return difference(self._spec.rows, union(self.answered, self.failed))

    @property
    def orphans(self) -> tuple[str, ...]:
        """Writers with segments that must be adopted, as of the last refresh."""
        return self._index.writers

    @property
    def stats(self) -> RowStats:
        return self._index.stats

    @property
    def device(self) -> Device:
        """The devices that the engines of a complete job held, from its report."""
        try:
            return json.loads(self._output.read(REPORT))["device"]
        except (OSError, ValueError, KeyError):
            return "device"

    def refresh(self, writer: str | None = None) -> None:
        """Read which parts and segments exist; with `writer`, only its segments. Raises OutputError."""
        try:
            self._index.refresh(writer)
        except UNREADABLE as error:
            raise self._failed("read", error) from error

    def durable(self, writer: str) -> RowRanges:
        return self._index.durable(writer)

    def already_merged(self, writer: str) -> RowRanges:
        """Return rows not to adopt from a writer: answered, or failed in its run or later."""
        return union(self.answered, self._index.failed_since(self._index.run_of(writer)))

    def merge_orphans(self) -> None:
        """Make parts of dead writers' segments. Raises OSError, OutputError."""
        if not (orphans := self.orphans):
            return
        allow_writes(self._output, self.run)
        writer = RowWriter(
            self._output, self._spec.form, run=self.run, shard=0, writer=f"rest-{uuid.uuid4().hex}"
        )
        for orphan in orphans:
            writer.take_over(orphan, self.already_merged(orphan))
        writer.close()
        self._index.refresh()

    def reopen(self) -> None:
        """Begin a run of a complete job, to answer failed rows again. Raises OutputError."""
        assert self.complete and self._job is not None, "only a complete job is reopened"
        try:
            self._output.remove(SUCCESS, MANIFEST)
            self._run(self._job.next(self._spec, renumbered=False))
        except OSError as error:
            raise self._failed("written", error) from error
        self.complete = False

    def finish(self, report: Mapping[str, Any]) -> None:
        """Make every row appear once, then write report and manifest, and `_SUCCESS` last.

        Writers must be closed. Retries for a minute. Raises OutputError; the job can then be resumed.
        """
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return self._finish(report)
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise self._failed("finished", error) from error
            time.sleep(RETRY_S)

    def close(self) -> None:
        self._lock.close()

    def _begin(self, resume: Resume, overwrite: bool, id_hashes: Callable[[], np.ndarray] | None) -> None:
        _remove_half_written(self._output)
        files = [entry.name for entry in results_in(self._output)]
        if overwrite:
            self._replace(files)
            return
        job = JobRun.read(self._output)
        if job is None or resume == "no":
            if job or any(not name.startswith(".") for name in files):
                raise not_empty(self._output.where, files)
            self._run(self._first(None))
        else:
            self._resume(job, resume, id_hashes)

    def _first(self, before: JobRun | None) -> JobRun:
        if before is None:  # remains of unknown runs must not count for this job
            self._output.remove_folder(RECORDS)
            self._output.remove_folder(PENDING)
        job = JobRun.first(self._spec, before)
        self._index = OutputIndex(self._output, first_run=job.first_run, numbering=job.numbering)
        return job

    def _replace(self, files: list[str]) -> None:
        """Begin a new job. Results of the earlier one are removed later, other files never."""
        try:
            before = JobRun.read(self._output)
        except (ValueError, KeyError, TypeError):
            before = None
        job = self._first(before)
        keep_earlier(self._output, job.run, [name for name in files if RESULT_NAME.fullmatch(name)])
        self._run(job)
        self._output.remove_folder(PENDING)

    def _resume(self, job: JobRun, resume: Resume, id_hashes: Callable[[], np.ndarray] | None) -> None:
        changed = self._spec.other_input(job.spec)
        self._spec.check_resume(self._output.where, job.spec, force=resume == "force")
        self._index = OutputIndex(self._output, first_run=job.first_run, numbering=job.numbering)
        self._index.refresh()
        replaced = earlier(self._output, job.first_run)
        check_parts(self._output.where, self._index, replaced)
        self.run = job.run
        if changed:
            self.merge_orphans()
        if SUCCESS in self._index.files and not replaced:
            self._job = job
            same = not (changed or self._spec.other_settings(job.spec) or self.unanswered)
            self.complete = same and manifest_parts(self._output) == self._index.records.keys()
            if self.complete:
                return
            self._output.remove(SUCCESS, MANIFEST)
        if not replaced:
            forget_earlier(self._output)
        self._run(job.next(self._spec, renumbered=bool(changed)))
        if self._index.stale:
            assert id_hashes is not None, "rows of a changed input are found by the hashes of their ids"
            renumber(self._output, self._index, self._spec.form, id_hashes(), self.run)

    def _run(self, job: JobRun) -> None:
        """Begin a run: from now on only its writers may write."""
        job.write(self._output)
        allow_writes(self._output, job.run)
        self._index.set_numbering(job.numbering)
        self._job, self.run = job, job.run

    def _finish(self, report: Mapping[str, Any]) -> None:
        self._check_ours()
        self._index.refresh()
        self.merge_orphans()
        allow_writes(self._output, None)
        self._index.refresh()  # reads what was written until now
        if unanswered := self.unanswered:
            raise OutputError(
                f"output: {count(unanswered)} rows are in no part of {self._output.where}. Run the same "
                "command again: it resumes.",
                param="output",
            )
        remove_earlier(self._output)
        compact(self._output, self._index, self._spec.form, self.run)
        self._output.remove_folder(PENDING)
        if not self.failed:
            self._output.remove_folder(ERRORS)
        write_json(self._output, REPORT, report)
        assert self._job is not None
        write_json(self._output, MANIFEST, manifest(self._index) | self._job.as_json())
        self._output.write(SUCCESS, b"")

    def _check_ours(self) -> None:
        job = JobRun.read(self._output)
        if not self._lock.is_held or job is None or job.run != self.run:
            raise OutputError(
                f"output: another job has taken {self._output.where} over; this one ends.", param="output"
            )

    def _failed(self, done: str, error: BaseException) -> OutputError:
        return OutputError(
            f"output: {self._output.where} cannot be {done} ({reason(error)}). "
            f"{count(self.answered) + count(self.failed)} rows are in its parts. Fix it, and run the same "
            "command again: it resumes.",
            param="output",
        )


def _remove_half_written(output: Storage) -> None:
    if output.local:
        root = Path(output.root)
        for folder in (FOLDER, ERRORS):
            output.path(folder)  # raises if it is a link
        below = ((root / folder).rglob(f"{TEMPORARY}*") for folder in (FOLDER, ERRORS))
        for path in itertools.chain(root.glob(f"{TEMPORARY}*"), *below):
            path.unlink(missing_ok=True)
