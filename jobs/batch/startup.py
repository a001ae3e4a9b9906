"""Prepares a batch job: indexes the input, records what the job is, opens the output, sizes the leases.

Reading all ids may take a while, so this runs in a thread while Ray and the engines start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...actors.batch.dataset.passthrough_columns import as_members
from ...actors.batch.dataset.row_requests import RowSchema
from ...actors.batch.ledger.job_spec import JobSpec, model_identity
from ...actors.batch.ledger.ledger import Ledger
from ...actors.batch.ledger.output_parts import OutputForm
from ...actors.batch.row_index import RowIndex, index_rows
from ...cluster.batch.row_ranges import RowRanges, count, from_rows, intersection, union
from ...cluster.config import at_load
from .engine_pool import EngineJob
from .messages import EngineSetup
from .options import BatchOptions

LEASE_ROWS_PER_SEQ = 8  # of the largest lease, for each row that an engine runs at once
LARGEST_LEASE = 2048
LEASE_BYTES = 32 * 2**20  # of the input's files; an engine holds a few times that in memory
SHARDS = 64  # of a job that preserves order, unless they would be very small or large
SMALLEST_SHARD, LARGEST_SHARD = 64, 4096


class Startup:
    """Makes the `EngineJob` in a thread; `job` fails with DatasetError or ConfigError."""

    def __init__(self, setup: EngineSetup, options: BatchOptions, say: Callable[[str], None]) -> None:
        self.job: Future[EngineJob] = Future()
        self.job.set_running_or_notify_cancel()  # a waiter that gives up does not cancel it
        self._setup = setup
        self._options = options
        self._say = say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manta-startup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self.job.exception() is None:
            self.job.result().ledger.close()

    def _run(self) -> None:
        try:
            self.job.set_result(self._prepare())
        except BaseException as error:  # the thread's edge
            self.job.set_exception(error)

    def _prepare(self) -> EngineJob:
        """Index the rows, open or create the ledger, and return the job of the rows still to answer."""
        options, setup = self._options, self._setup
        source = setup.source
        index = index_rows(
            source, setup.row_schema, duplicates=options.duplicate_ids, stop=self._stopping.is_set
        )
        format, columns = options.format(source), index.columns
        if source.lines and format != "parquet":
            columns = as_members(columns)
        form = OutputForm(format, columns, options.preserve_order)
        spec = _job_spec(setup, options, form, index)
        ledger = Ledger.open(
            setup.output,
            spec,
            resume=options.resume,
            overwrite=options.overwrite,
            id_hashes=index.id_hashes,
            say=self._say,
        )
        if ledger.complete and options.retry_failed and ledger.failed:
            ledger.reopen()
        rows = ledger.unanswered
        if options.retry_failed:
            rows = intersection(union(rows, ledger.failed), spec.rows)
        largest, smallest = self._lease_sizes(index.num_rows)
        if form.ordered:
            largest = rows_per_shard(index.num_rows)
        return EngineJob(
            spec=spec,
            index=index,
            ledger=ledger,
            form=form,
            rows=rows,
            num_rows=count(spec.rows),
            largest=largest,
            smallest=min(smallest, largest),
        )

    def _lease_sizes(self, num_rows: int) -> tuple[int, int]:
        max_num_seqs = self._setup.config.max_num_seqs
        row_bytes = sum(file.size for file in self._setup.source.files) // num_rows + 1
        largest = min(LEASE_ROWS_PER_SEQ * max_num_seqs, LARGEST_LEASE, LEASE_BYTES // row_bytes)
        return max(largest, 1), max(max_num_seqs // 8, 1)


def rows_per_shard(num_rows: int) -> int:
    """Return the shard size of a job that preserves order. It depends on the rows alone, for resuming."""
    return min(max(-(-num_rows // SHARDS), SMALLEST_SHARD), LARGEST_SHARD)


def sampled(num_rows: int, wanted: int, seed: int) -> RowRanges | None:
    """Draw the rows of a sample, the same in every run; None means all."""
    if wanted >= num_rows:
        return None
    drawn = np.random.default_rng(seed).choice(num_rows, size=wanted, replace=False)
    return from_rows(sorted(drawn.tolist()))


def _job_spec(setup: EngineSetup, options: BatchOptions, form: OutputForm, index: RowIndex) -> JobSpec:
    """Return what identifies the job: a later run with other values of `made_from` does not resume it."""
    num_rows, row_schema, spec = index.num_rows, setup.row_schema, setup.config.speculative_config
    quantization = at_load(setup.config.quantization)
    return JobSpec(
        made_from={
            **model_identity(setup.config),
            "dtype": setup.config.dtype,
            **({} if quantization is None else {"quantization": quantization}),
            "max_model_len": setup.config.max_model_len,
            "sampling": dict(row_schema.defaults),
            "seed": row_schema.seed,
            "kind": row_schema.kind,
            "prompt_column": row_schema.prompt_column,
            "template": row_schema.template,
            "id_column": row_schema.id_column,
            **_row_identity(row_schema),
        },
        input=setup.source.identity(index.digests),
        input_format=setup.source.format,
        form=form,
        num_rows=num_rows,
        sample=None if options.sample is None else sampled(num_rows, options.sample, row_schema.seed),
        rows_per_shard=rows_per_shard(num_rows) if form.ordered else None,
        about={
            "drafter": None if spec is None else spec.drafter,
            "concurrency": str(options.concurrency),
            "model_name": setup.model_name,
        },
    )


def _row_identity(row_schema: RowSchema) -> dict[str, Any]:  # Any: JSON
    """Return what else rows mean; a job that was begun when rows had version 1 has no such key."""
    own = {"row_version": row_schema.version, "chat": row_schema.chat, "system": row_schema.system}
    unset = {"row_version": 1, "chat": False, "system": None}
    return {} if row_schema.kind == "openai" else {k: v for k, v in own.items() if v != unset[k]}
