"""What dead engines leave behind: rows they had finished, and rows that killed them.

Done by light tasks on the cluster, without a CPU of their own: the driver writes no rows. Called by
`pool.py`, also for the engines that an earlier run of the job has left.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError, RayTaskError

from ...actors.batch.answering import Result, unanswered
from ...actors.batch.ledger import Ledger
from ...actors.batch.reading import Row, RowReader, Work
from ...actors.batch.rows import Layout
from ...actors.batch.writer import RowWriter
from ...cluster.errors import EngineDeadError
from ...cluster.row_ranges import RowRanges, union
from .messages import EngineSetup, Terms

ATTEMPTS = 3
# No retries of Ray's own: what a task that died has left is looked at before the next one begins.
LIGHT: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}  # Any: Ray's options


class Estates:
    """Settles what dead writers of a job leave.

    Args:
        setup: in Ray's store.
    """

    def __init__(self, setup: ray.ObjectRef, terms: Terms, ledger: Ledger) -> None:
        self._setup = setup
        self._terms = terms
        self._ledger = ledger
        self._reading = asyncio.Lock()  # of the ledger

    async def settle(self, writer: str) -> RowRanges:
        """See that what a dead writer has finished is in parts. Returns those rows. Raises OutputError."""
        for attempt in range(ATTEMPTS):
            async with self._reading:
                await asyncio.to_thread(self._ledger.refresh)
                durable = self._ledger.durable(writer)
                if writer not in self._ledger.orphans:  # it left no segments
                    return durable
                known = self._ledger.known(writer)
            try:
                return union(durable, await _adopt.remote(self._setup, self._terms, writer, known))
            except RayError as error:
                if isinstance(error, RayTaskError) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def explain(self, work: Work, deaths: Mapping[int, int], shards: Mapping[int, int | None]) -> None:
        """Write error rows for rows that killed engines.

        Args:
            deaths: that each row has seen.
            shards: of each row; None where order is free.
        """
        await _explain.remote(self._setup, self._terms, work, deaths, shards)


@ray.remote(**LIGHT)
def _adopt(setup: EngineSetup, terms: Terms, writer: str, known: RowRanges) -> RowRanges:
    heir = _writer(setup, terms)
    rows = heir.adopt(writer, known)
    heir.close()
    return rows


@ray.remote(**LIGHT)
def _explain(
    setup: EngineSetup, terms: Terms, work: Work, deaths: Mapping[int, int], shards: Mapping[int, int | None]
) -> None:
    writer = _writer(setup, terms)
    reader = RowReader(setup.source, setup.layout)
    for row in reader.read(work):
        writer.add(
            [_killer(row, setup.layout, terms.form.columns, deaths[row.number])], shard=shards[row.number]
        )
    reader.close()
    writer.close()


def _killer(row: Row, layout: Layout, columns: pa.Schema, deaths: int) -> Result:
    """The result of a row that killed the engine which had nothing but it."""
    message = (
        f"An engine died whenever it had this row: {deaths} times, the last time with this row alone. All "
        "other rows go on without it."
    )
    return unanswered(row, EngineDeadError.__name__, message, layout, columns, attempts=deaths)


def _writer(setup: EngineSetup, terms: Terms) -> RowWriter:
    name = f"estate-{uuid.uuid4().hex}"
    return RowWriter(setup.output, terms.form, run=terms.run, shard=0, writer=name)
