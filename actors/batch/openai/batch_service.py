"""The worker of `/v1/batches` in a replica: finds batches that have not ended, and runs them.

All state is in the storage, so a starting replica finds the batches that another left; the holder of a
ledger's lock runs its batch. The API keys take turns, in opening batches and for the slots of rows. A replica
takes another batch of a key when those that it has leave slots free, so that batches spread over replicas and
no engine idles while a batch's last rows run. Runs on the application's event loop, with storage and files in
threads. Rows yield to online requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest

from ....cluster.errors import EngineDeadError, InUseError, RequestError, brief
from ....cluster.request.caller import Caller
from ...chat.chat_model import ChatModel
from ...engine.async_engine import AsyncEngine
from ...observability.telemetry import BatchLines
from ...system.key_slots import KeySlots
from ...tokenization.generation_config import GenerationDefaults
from ..dataset.storage import Storage
from ..ledger.job_spec import model_identity
from ..row_answerer import RowAnswerer
from .batch_admission import LAYOUT, BatchOpener, OpenBatch
from .batch_run import BatchRun
from .batch_store import Batch, BatchStore
from .file_store import FileStore

logger = logging.getLogger(__name__)

POLL_S = 5.0  # for requests at other replicas; local ones wake the worker
RETRY_S = 30.0  # after a failure not caused by the batch
IN_FLIGHT = 1.25  # rows in flight per row that the engine runs at once, so the next are read early


class BatchService:
    """Serves the batch routes (`files`, `batches`), and runs batches.

    Args:
        names: names of the model; the first is reported.
        count_lines: called on the event loop with counts of durable lines.
    """

    def __init__(
        self,
        storage: Storage,
        engine: AsyncEngine,
        generation: GenerationDefaults,
        names: Sequence[str],
        *,
        max_lines: int,
        max_stored_bytes: int,
        chat: ChatModel,
        count_lines: Callable[[BatchLines], None],
    ) -> None:
        self.files = FileStore(storage, max_stored_bytes)
        self.batches = BatchStore(storage)
        self._engine = engine
        self._generation = generation
        self._names = names
        self._chat = chat
        made_from = {  # the drafter does not change results
            **model_identity(engine.config),
            "dtype": engine.info.dtype,
            "max_model_len": engine.info.max_model_len,
            "generation": asdict(generation),
        }
        self._opener = BatchOpener(self.batches, self.files, names, made_from, max_lines)
        self._slots = KeySlots(max(2, int(IN_FLIGHT * engine.config.max_num_seqs)))
        self._count_lines = count_lines
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._last_visits_s: dict[str | None, float] = {}  # by owner
        self._wake = asyncio.Event()

    def create(self, batch: Batch, caller: Caller) -> None:
        """Store a new batch, which will be run. Blocking. Raises RequestError, NotFoundError."""
        file = self.files.get(batch.input_file_id, caller)
        if file.purpose != "batch":
            raise RequestError(
                f'The file {file.id} has the purpose {brief(file.purpose)}; upload the input with "batch".',
                param="input_file_id",
            )
        self.files.check_quota(caller.owner)
        self.batches.create(batch)

    def wake(self) -> None:
        self._wake.set()

    def delete_file(self, file_id: str, caller: Caller) -> None:
        """Delete a file. Blocking. Raises NotFoundError, RequestError if a batch needs it."""
        file = self.files.get(file_id, caller)
        for batch_id in self.batches.queued() if file.purpose == "batch" else ():
            batch = self.batches.saved(batch_id)
            if batch is not None and batch.input_file_id == file_id and not batch.ended:
                raise RequestError(
                    f"The file {file_id} is the input of {batch_id}, which is {batch.status}. Cancel that "
                    "first.",
                    param="file_id",
                )
        self.files.delete(file)

    async def work_forever(self) -> None:
        """Find and run batches until cancelled; then make answered rows durable."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.files.remove_leftovers)
        try:
            while True:
                self._wake.clear()
                try:
                    await self._poll()
                except Exception:  # the task's outermost level: the storage may recover
                    logger.exception("batches in %s cannot be listed", self.batches.storage.where)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _poll(self) -> None:
        try:
            self._engine.check_health()
        except EngineDeadError:  # its lines must not be blamed again
            return
        has_opened = False
        for batch_id, owner in self._in_turn(await asyncio.to_thread(self.batches.queued)):
            if batch_id in self._tasks or time.monotonic() < self._not_before_s.get(batch_id, 0.0):
                continue
            if has_opened and self._wake.is_set():  # another key may have a new batch: list again
                return
            has_opened = True
            opening = asyncio.ensure_future(
                asyncio.to_thread(self._opener.open, batch_id, has_capacity=self._has_capacity(owner))
            )
            self._last_visits_s[owner] = time.monotonic()
            try:
                opened = await asyncio.shield(opening)
            except asyncio.CancelledError:
                if (opened := await opening) is not None:
                    opened.close()
                raise
            except InUseError:  # locking in an object store takes seconds
                wait_s = 0.0 if self.batches.storage.local else RETRY_S
                self._not_before_s[batch_id] = time.monotonic() + wait_s
                continue
            except Exception:  # continue with the rest of the queue
                logger.exception("%s cannot be opened; it is tried again in %.0f s", batch_id, RETRY_S)
                self._not_before_s[batch_id] = time.monotonic() + RETRY_S
                continue
            if opened is not None:
                self._begin(opened)

    def _in_turn(self, queued: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
        """Return batches with their owners: the first of each, then the second, as they were last visited."""
        by_owner: dict[str | None, list[tuple[str, str | None]]] = {}
        for batch_id, owner in queued.items():
            by_owner.setdefault(owner, []).append((batch_id, owner))
        owners = sorted(by_owner, key=lambda owner: self._last_visits_s.get(owner, 0.0))
        rounds = zip_longest(*(by_owner[owner] for owner in owners))
        return [each for turn in rounds for each in turn if each is not None]

    def _has_capacity(self, owner: str | None) -> bool:
        """Return whether another batch of an owner may begin: its first one, or if its others leave slots."""
        own = [run for run in self._runs.values() if run.batch.owner == owner]
        return not own or (self._slots.num_free > 0 and all(run.all_started for run in own))

    def _begin(self, opened: OpenBatch) -> None:
        batch_id = opened.batch.id
        answerer = RowAnswerer(
            self._engine,
            LAYOUT,
            self._generation,
            self._names[0],
            background=True,
            chat=self._chat,
            prefix=f"{batch_id}/",
            caller=Caller(owner=opened.batch.owner, domain=opened.batch.domain),
        )
        run = BatchRun(
            opened, self.batches, self.files, answerer, self._slots, self._wake.set, self._count_lines
        )
        self._runs[batch_id] = run
        self._tasks[batch_id] = asyncio.create_task(self._work(run))

    async def _work(self, run: BatchRun) -> None:
        """Run one batch. After a failure it is tried again, here or elsewhere."""
        batch_id = run.batch.id
        try:
            await run.run()
            logger.info("%s is %s: %s", batch_id, run.batch.status, run.batch.request_counts)
        except EngineDeadError as error:  # Serve replaces the replica, and the new one continues
            logger.warning("%s is left to another replica: %s", batch_id, error)
        except Exception:  # the task's outermost level
            logger.exception("%s is interrupted; it is tried again in %.0f s", batch_id, RETRY_S)
            self._not_before_s[batch_id] = time.monotonic() + RETRY_S
        finally:
            del self._runs[batch_id], self._tasks[batch_id]
            self._wake.set()
