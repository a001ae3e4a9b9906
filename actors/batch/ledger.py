"""The ledger of an output: whose it is, which rows are done, and the end of the job.

    open    lock it; go on with the job that is there, begin one, or refuse, naming what is in the way
    ...     engines write (`writer.py`); `refresh` reads what they have made durable
    finish  every row once (`sweep.py`), then manifest, report and, last, `_SUCCESS`

Held by whoever drives a job: the driver of `manta batch`, the replica that works off `/v1/batches`. All it
knows stands in the output; no database, nothing in memory alone. Not for engines: they write without it.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from ...cluster.errors import ConfigError, OutputError
from ...cluster.row_ranges import RowRanges, count, minus, union
from ..files import TEMPORARY
from .contents import Contents, results_in
from .figures import Device, RowFigures
from .lock import Lock, lock
from .paper import JobPaper
from .parts import FOLDER, MANIFEST, PENDING, PICTURES, RECORDS, REPORT, RESULT_NAME, SUCCESS, present_name
from .refusals import check_parts, check_same, not_empty
from .renumber import renumber
from .runs import (
    Job,
    earlier,
    forget_earlier,
    keep_earlier,
    let_write,
    reason,
    remove_earlier,
    write_json,
)
from .source import ERRORS
from .storage import Storage
from .sweep import listed, manifest_parts, settle
from .writer import GIVE_UP_S, RETRY_S, RowWriter

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    pa.ArrowException,
)  # of papers and records

Resume = Literal["yes", "no", "force"]


class Ledger:
    """An output that is ours to write. Made by `open`.

    Attributes:
        run: the number of this run; what writers are told.
        complete: all is done, and nothing was begun; `reopen` begins a run nevertheless.
    """

    def __init__(self, output: Storage, paper: JobPaper, lock: Lock) -> None:
        self.run = 0
        self.complete = False
        self._output = output
        self._paper = paper
        self._lock = lock
        self._contents = Contents(output, first_run=0, numbering=0)
        self._job: Job | None = None

    @classmethod
    def open(
        cls,
        output: Storage,
        paper: JobPaper,
        *,
        resume: Resume = "yes",
        overwrite: bool = False,
        id_hashes: Callable[[], np.ndarray] | None = None,
        say: Callable[[str], object] = lambda words: None,
        held: Lock | None = None,
    ) -> Self:
        """Take an output, for a new job or for one more run of the one that is there.

        Args:
            resume: "no" refuses an output that is not empty; "force" goes on though settings or input differ.
            overwrite: begin anew; earlier results stay until there is something in their place.
            id_hashes: `Survey.id_hashes`, by which rows of a changed input are found again.
            say: told why this takes long.
            held: the output's lock, where it was taken before; the ledger's from now on, unless this raises.

        Raises ConfigError, which names what is in the way and the remedy.
        """
        ledger = cls(output, paper, held or lock(output, say))
        try:
            ledger._begin(resume, overwrite, id_hashes)
        except UNREADABLE as error:
            if held is None:
                ledger.close()
            raise ConfigError(
                f"output: {output.where} cannot be used ({reason(error)}). Mend it, choose another with "
                "--output, or replace it with --overwrite.",
                param="output",
            ) from error
        except BaseException:
            if held is None:
                ledger.close()
            raise
        return ledger

    @property
    def answered(self) -> RowRanges:
        """Rows in answered parts."""
        return self._contents.answered

    @property
    def failed(self) -> RowRanges:
        """Rows that stand as failed."""
        return self._contents.failed

    @property
    def left(self) -> RowRanges:
        """Rows that are to be answered and are in no part."""
        return minus(self._paper.rows, union(self.answered, self.failed))

    @property
    def orphans(self) -> tuple[str, ...]:
        """Writers whose segments are to be adopted, as of the last refresh: at the start all are dead."""
        return self._contents.writers

    @property
    def figures(self) -> RowFigures:
        """Of all parts."""
        return self._contents.figures

    @property
    def device(self) -> Device:
        """What the engines of a complete job held, as its report says; "device" where that cannot be read."""
        try:
            return json.loads(self._output.read(REPORT))["device"]
        except (OSError, ValueError, KeyError):
            return "device"

    def refresh(self, writer: str | None = None) -> None:
        """Read again what parts and segments there are. Raises OutputError.

        Args:
            writer: only its segments are looked at, beside all parts.
        """
        try:
            self._contents.refresh(writer)
        except UNREADABLE as error:
            raise self._failed("read", error) from error

    def durable(self, writer: str) -> RowRanges:
        """Rows of a writer in parts or segments, as of the last refresh."""
        return self._contents.durable(writer)

    def known(self, writer: str) -> RowRanges:
        """What need not be adopted of a writer: rows answered, and rows that failed in its run or later."""
        return union(self.answered, self._contents.failed_since(self._contents.run_of(writer)))

    def adopt_orphans(self) -> None:
        """Make parts of what dead writers have finished. Raises OSError, OutputError."""
        if not (orphans := self.orphans):
            return
        let_write(self._output, self.run)
        writer = RowWriter(
            self._output, self._paper.form, run=self.run, shard=0, writer=f"rest-{uuid.uuid4().hex}"
        )
        for orphan in orphans:
            writer.adopt(orphan, self.known(orphan))
        writer.close()
        self._contents.refresh()

    def reopen(self) -> None:
        """Begin a run of a complete job, to answer failed rows again: `_SUCCESS` goes. Raises OutputError."""
        assert self.complete and self._job is not None, "only a complete job is reopened"
        try:
            self._output.remove(SUCCESS, MANIFEST)
            self._run(self._job.next(self._paper, renumbered=False))
        except OSError as error:
            raise self._failed("written", error) from error
        self.complete = False

    def finish(self, report: Mapping[str, Any], html: str | None = None) -> None:
        """Let every row stand once, then write the papers; `_SUCCESS` last. All writers are closed.

        Tried again for a minute while the output fails. Raises OutputError; the job can be resumed.
        """
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return self._finish(report, html)
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise self._failed("finished", error) from error
            time.sleep(RETRY_S)

    def close(self) -> None:
        """Leave the output to others. Idempotent."""
        self._lock.close()

    def _begin(self, resume: Resume, overwrite: bool, id_hashes: Callable[[], np.ndarray] | None) -> None:
        _remove_half_written(self._output)
        files = [entry.name for entry in results_in(self._output)]
        if overwrite:
            self._replace(files)
            return
        job = Job.read(self._output)
        if job is None or resume == "no":
            if job or any(not name.startswith(".") for name in files):
                raise not_empty(self._output.where, files)
            self._run(self._first(None))
        else:
            self._resume(job, files, resume, id_hashes)

    def _first(self, before: Job | None) -> Job:
        if before is None:  # whatever its runs were, nothing of them is to be taken for this job's
            self._output.remove_folder(RECORDS)
            self._output.remove_folder(PENDING)
        job = Job.first(self._paper, before)
        self._contents = Contents(self._output, first_run=job.first_run, numbering=job.numbering)
        return job

    def _replace(self, files: list[str]) -> None:
        """A new job in the place of whatever was there. Its own files go later, those of others never."""
        try:
            before = Job.read(self._output)
        except (ValueError, KeyError, TypeError):
            before = None
        job = self._first(before)
        keep_earlier(self._output, job.run, [name for name in files if RESULT_NAME.fullmatch(name)])
        self._run(job)
        self._output.remove_folder(PENDING)

    def _resume(
        self, job: Job, files: Sequence[str], resume: Resume, id_hashes: Callable[[], np.ndarray] | None
    ) -> None:
        changed = self._paper.other_input(job.paper)
        check_same(self._output.where, self._paper, job.paper, force=resume == "force")
        _rename_earlier(self._output, files)
        self._contents = Contents(self._output, first_run=job.first_run, numbering=job.numbering)
        self._contents.refresh()
        replaced = earlier(self._output, job.first_run)
        check_parts(self._output.where, self._contents, replaced)
        self.run = job.run
        if changed:
            self.adopt_orphans()
        if SUCCESS in self._contents.files and not replaced:
            self._job = job
            same = not (changed or self._paper.other_settings(job.paper) or self.left)
            self.complete = same and manifest_parts(self._output) == self._contents.records.keys()
            if self.complete:
                return
            self._output.remove(SUCCESS, MANIFEST)
        if not replaced:
            forget_earlier(self._output)
        self._run(job.next(self._paper, renumbered=bool(changed)))
        if self._contents.stale:
            assert id_hashes is not None, "rows of a changed input are found by the hashes of their ids"
            renumber(self._output, self._contents, self._paper.form, id_hashes(), self.run)

    def _run(self, job: Job) -> None:
        """Begin a run: from here on its writers may write, and no others."""
        job.write(self._output)
        let_write(self._output, job.run)
        self._contents.renumber(job.numbering)
        self._job, self.run = job, job.run

    def _finish(self, report: Mapping[str, Any], html: str | None) -> None:
        self._check_ours()
        self._contents.refresh()
        self.adopt_orphans()
        let_write(self._output, None)
        self._contents.refresh()  # what was written up to here
        if left := self.left:
            raise OutputError(
                f"output: {count(left)} rows are in no part of {self._output.where}. Run the same command "
                "again: it resumes.",
                param="output",
            )
        remove_earlier(self._output)
        settle(self._output, self._contents, self._paper.form, self.run)
        self._output.remove_folder(PENDING)
        if not self.failed:
            self._output.remove_folder(ERRORS)
        write_json(self._output, REPORT, report)
        if html is not None:
            self._output.write(PICTURES, html.encode())
        assert self._job is not None
        write_json(self._output, MANIFEST, listed(self._contents) | self._job.as_json())
        self._output.write(SUCCESS, b"")

    def _check_ours(self) -> None:
        job = Job.read(self._output)
        if not self._lock.held or job is None or job.run != self.run:
            raise OutputError(
                f"output: another job has taken {self._output.where} over; this one ends.", param="output"
            )

    def _failed(self, done: str, error: BaseException) -> OutputError:
        return OutputError(
            f"output: {self._output.where} cannot be {done} ({reason(error)}). "
            f"{count(self.answered) + count(self.failed)} rows are in its parts. Mend it, and run the same "
            "command again: it resumes.",
            param="output",
        )


def _remove_half_written(output: Storage) -> None:
    """What a kill has left. Object stores show no such things."""
    if output.local:
        root = Path(output.root)
        for folder in (FOLDER, ERRORS):
            output.path(folder)  # raises if it is a link
        below = ((root / folder).rglob(f"{TEMPORARY}*") for folder in (FOLDER, ERRORS))
        for path in itertools.chain(root.glob(f"{TEMPORARY}*"), *below):
            path.unlink(missing_ok=True)


def _rename_earlier(output: Storage, files: Sequence[str]) -> None:
    """Bring results that an earlier version of ours has written to where they stand now."""
    for name in files:
        if (now := present_name(name)) != name:
            output.write(now, output.read(name))
            output.remove(name)
