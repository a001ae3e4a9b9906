"""What dead engines leave behind: rows they had finished, and rows that killed them.

Done by light tasks on the cluster, without a CPU of their own: the driver writes no rows. Called by `pool.py`,
also for the engines that an earlier run of the job has left.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ...actors.batch.answering import Result, failure
from ...actors.batch.ledger import Ledger
from ...actors.batch.reading import Row, RowReader, Work
from ...actors.batch.rows import Layout
from ...actors.batch.writer import RowWriter
from ...cluster.errors import EngineDeadError
from ...cluster.row_ranges import RowRanges, union
from .engine import EngineSetup

ATTEMPTS = 3
# No retries of Ray's own: what a task that died has left is looked at before the next one begins.
LIGHT: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}  # Any: Ray's options


class Estates:
    """Settles what dead writers of a job leave.

    Attributes:
        setup: in Ray's store, for all who need it.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = ray.put(setup)
        self._reading = asyncio.Lock()  # of the ledger

    async def settle(self, ledger: Ledger, writer: str) -> RowRanges:
        """See that all that a dead writer has finished is in parts. Returns those rows. Raises OutputError."""
        for attempt in range(ATTEMPTS):
            async with self._reading:
                await asyncio.to_thread(ledger.refresh)
                durable, known = ledger.durable(writer), ledger.known(writer)
            try:
                return union(durable, await _adopt.remote(self.setup, ledger.run, writer, known))
            except RayError as error:
                if isinstance(error, RayTaskError) or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def explain(
        self, ledger: Ledger, work: Work, deaths: Mapping[int, int], shards: Mapping[int, int | None]
    ) -> None:
        """Write error rows for rows that killed engines.

        Args:
            deaths: that each row has seen.
            shards: of each row; None where order is free.
        """
        await _explain.remote(self.setup, ledger.run, work, deaths, shards)


@ray.remote(**LIGHT)
def _adopt(setup: EngineSetup, run: int, writer: str, known: RowRanges) -> RowRanges:
    heir = _writer(setup, run)
    rows = heir.adopt(writer, known)
    heir.close()
    return rows


@ray.remote(**LIGHT)
def _explain(
    setup: EngineSetup, run: int, work: Work, deaths: Mapping[int, int], shards: Mapping[int, int | None]
) -> None:
    writer = _writer(setup, run)
    for row in RowReader(setup.source, setup.layout).read(work):
        writer.add([_killer(row, setup.layout, deaths[row.number])], shard=shards[row.number])
    writer.close()


def _writer(setup: EngineSetup, run: int) -> RowWriter:
    return RowWriter(setup.output, setup.form, run=run, shard=0, writer=f"estate-{uuid.uuid4().hex}")
