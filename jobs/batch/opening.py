"""What must be known before rows are answered: how many there are, whose the output is, which are left.

A look at all rows may take a while, so it happens in a thread beside the start of Ray and of the engines.
Called by `job.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from ...actors.batch.columns import as_members
from ...actors.batch.ledger import Ledger
from ...actors.batch.parts import OutputForm
from ...actors.batch.survey import survey
from ...cluster.plain_sample import num_plain_rows
from ...cluster.row_ranges import both, count, union
from .messages import EngineSetup
from .options import BatchOptions
from .papers import job_paper, rows_per_shard
from .pool import Job

ROWS_PER_SEAT = 8  # of the largest lease, for each row that an engine runs at once
LARGEST_LEASE = 2048
LEASE_BYTES = 32 * 2**20  # of the input's files: what an engine has in memory is some times that


class Opening:
    """The job, as soon as it is known.

    Args:
        say: takes a line for the user.

    Attributes:
        job: what engines work on. Fails with DatasetError, and with ConfigError: the output is another's.
    """

    def __init__(
        self,
        setup: EngineSetup,
        options: BatchOptions,
        say: Callable[[str], None],
    ) -> None:
        self.job: Future[Job] = Future()
        self.job.set_running_or_notify_cancel()  # who waits for it and gives up does not end it
        self._setup = setup
        self._options = options
        self._say = say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manta-opening", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the output to others. Idempotent."""
        self._stopping.set()
        self._thread.join()
        if self.job.exception() is None:
            self.job.result().ledger.close()

    def _run(self) -> None:
        try:
            self.job.set_result(self._open())
        except BaseException as error:  # the thread's edge: it goes to whoever waits, if somebody still does
            self.job.set_exception(error)

    def _open(self) -> Job:
        options, setup = self._options, self._setup
        found = survey(
            setup.source, setup.layout, duplicates=options.duplicate_ids, stop=self._stopping.is_set
        )
        format = options.format(setup.source)
        columns = found.columns
        if setup.source.lines and format != "parquet":
            columns = as_members(columns)
        form = OutputForm(format, columns, options.preserve_order)
        paper = job_paper(setup, options, form, found)
        ledger = Ledger.open(
            setup.output,
            paper,
            resume=options.resume,
            overwrite=options.overwrite,
            id_hashes=found.id_hashes,
            say=self._say,
        )
        if ledger.complete and options.retry_failed and ledger.failed:
            ledger.reopen()
        rows = ledger.left
        if options.retry_failed:
            rows = both(union(rows, ledger.failed), paper.rows)
        largest, smallest = self._lease_sizes(found.num_rows)
        if form.ordered:
            largest = rows_per_shard(found.num_rows)
        return Job(
            paper=paper,
            survey=found,
            ledger=ledger,
            form=form,
            rows=rows,
            plain_rows=self._plain_rows(count(rows)),
            num_rows=count(paper.rows),
            largest=largest,
            smallest=min(smallest, largest),
        )

    def _plain_rows(self, num_rows: int) -> int:
        """None where there is nothing to compare."""
        config = self._setup.config
        if config.speculative_config is None:
            return 0
        return num_plain_rows(num_rows, config.max_num_seqs, self._options.plain_sample)

    def _lease_sizes(self, num_rows: int) -> tuple[int, int]:
        """As large as an engine's order of rows can use and its memory holds, as small as the end wants."""
        seats = self._setup.config.max_num_seqs
        row_bytes = sum(file.size for file in self._setup.source.files) // num_rows + 1
        largest = min(ROWS_PER_SEAT * seats, LARGEST_LEASE, LEASE_BYTES // row_bytes)
        return max(largest, 1), max(seats // 8, 1)
