"""From a name in the queue to a batch of `/v1/batches` that this replica may work on, or to its early end.

Whoever wants to change a batch's paper takes its lock first; what a file holds is looked at under it.
Blocking. Called by `service.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.caller import SERVER
from ...cluster.errors import DatasetError, NotFoundError, without_values
from .batch_store import Batch, BatchStore
from .checking import check_lines, errors_list, plain_error
from .file_store import FileStore, JsonObject, StoredFile
from .job_spec import JobSpec
from .ledger import Ledger
from .lock import Lock, lock
from .parts import OutputForm
from .row_index import RowIndex, index_rows
from .row_reader import RowReader
from .rows import Layout
from .runs import Job
from .source import Source, SourceFile

logger = logging.getLogger(__name__)

LAYOUT = Layout(kind="openai", lines=True)
FORM = OutputForm(format="openai")


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that is ours, and what is needed to work on it.

    Attributes:
        given_up: why its lines cannot be answered any more: what is answered stays, the others say so.
    """

    batch: Batch
    lock: Lock
    ledger: Ledger
    index: RowIndex
    reader: RowReader
    given_up: JsonObject | None = None

    def close(self) -> None:
        """Let others have it."""
        self.reader.close()
        self.ledger.close()


class Opener:
    """Opens batches for one replica.

    Args:
        names: of the model.
        made_from: what answers depend on; a batch that was begun with other settings is given up.
        max_lines: of a batch.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        names: Sequence[str],
        made_from: Mapping[str, Any],  # Any: JSON
        max_lines: int,
    ) -> None:
        self._batches = batches
        self._files = files
        self._names = names
        self._made_from = made_from
        self._max_lines = max_lines

    def open(self, batch_id: str, *, has_room: bool) -> OpenBatch | None:
        """The batch, if it is ours to work on now.

        Args:
            has_room: for its rows; without, only what needs none is done: checking its file, ending it early.

        Raises:
            InUseError: another replica has it.
            ConfigError, OSError: the storage is at fault.
        """
        batch = self._batches.find(batch_id)
        if batch is None:
            self._batches.drop_abandoned(batch_id)
            return None
        if batch.ended:  # whoever ended it was killed before it left the queue
            self._batches.leave_queue(batch_id)
            return None
        if batch.status == "in_progress" and not (has_room or batch.is_late):
            return None
        held = lock(self._batches.output(batch_id), logger.info)
        opened = None
        try:
            opened = self._open(batch_id, held, has_room=has_room)
        finally:
            if opened is None:
                held.close()
        return opened

    def _open(self, batch_id: str, held: Lock, *, has_room: bool) -> OpenBatch | None:
        batch = self._batches.kept(batch_id)  # it may have changed before we had the lock
        if batch is None or batch.ended:
            return None
        try:
            file = self._files.get(batch.input_file_id, SERVER)
            if batch.status == "validating":
                batch = self._checked(batch, file)
                asked = self._batches.cancel_asked_at(batch_id) is not None
                if batch.ended or not (has_room or batch.is_late or asked):
                    return None
            return self._begun(batch, file, held)
        except (DatasetError, NotFoundError) as error:
            self._fail(batch, plain_error("input_file_unusable", error.message))
            return None

    def _checked(self, batch: Batch, file: StoredFile) -> Batch:
        """The batch after a look at its lines: in progress, or failed."""
        (name,) = file.pieces
        found = check_lines(self._files.storage.reader(name), batch.endpoint, self._names, self._max_lines)
        if found.errors:
            return self._fail(batch, errors_list(found.errors))
        counts = batch.request_counts | {"total": found.num_lines}
        batch = batch.moved("in_progress", model=found.model or self._names[0], request_counts=counts)
        self._batches.save(batch)
        return batch

    def _begun(self, batch: Batch, file: StoredFile, held: Lock) -> OpenBatch:
        source = self._source(file)
        found = index_rows(source, LAYOUT)
        paper = JobSpec(
            made_from=self._made_from,
            input=[{"name": file.id, "size": file.bytes, **found.digests[0]}],  # the storage may have moved
            input_format=source.format,
            form=FORM,
            num_rows=found.num_rows,
        )
        output = self._batches.output(batch.id)
        given_up = _given_up(batch.id, Job.read(output), paper)
        ledger = Ledger.open(output, paper, resume="force" if given_up else "yes", held=held)
        return OpenBatch(batch, held, ledger, found, RowReader(source, LAYOUT), given_up)

    def _source(self, file: StoredFile) -> Source:
        """Raises NotFoundError."""
        (name,) = file.pieces
        storage = self._files.storage
        entry = storage.entry(name)
        if entry is None:
            raise NotFoundError(f"The content of the file {file.id} is gone.", param="input_file_id")
        return Source((SourceFile(storage, name, entry.size, entry.modified_s),), "openai")

    def _fail(self, batch: Batch, errors: JsonObject) -> Batch:
        failed = batch.moved("failed", errors=errors)
        self._batches.save(failed)
        logger.info("%s has failed: %s", batch.id, without_values(errors["data"][0]["message"]))
        return failed


def _given_up(batch_id: str, begun: Job | None, paper: JobSpec) -> JsonObject | None:
    """Why a batch that was begun cannot be gone on with: its other lines would be answered otherwise."""
    changes = paper.differences(begun.paper) if begun is not None else []
    if not changes:
        return None
    said = f"The server was started anew with other settings: {'; '.join(changes)}."
    logger.error("%s is given up. %s", batch_id, said)
    return plain_error("settings_changed", f"{said} Send the lines that were not answered in a new batch.")
