"""Stored batches of `/v1/batches`: one JSON object each, in OpenAI's format, and its status transitions.

    batches/<id>.json     the batch
    batches/<id>.cancel   its cancellation was requested, and when
    queue/<id>            it has not ended; a starting replica looks here
    work/<id>/out/        its ledger (`actors/batch/ledger/ledger.py`): its lock says which replica runs it
    work/<id>/leases.json which rows the engine of that replica has

A batch has one writer: the route that creates it, then the holder of the lock. Others only write separate
files. Blocking and stateless, so any replica can serve any request.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from ....cluster.errors import NotFoundError, RateLimitError, RequestError, brief
from ....cluster.request.caller import Caller
from ..dataset.storage import Storage
from .file_store import JsonObject, OwnerIndex, Page, ordered_id, page, read_object

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
HIDDEN = ("owner", "domain", "tenant")  # stored, but not part of OpenAI's object
FOLDER, QUEUE, WORK = "batches", "queue", "work"
LEASES = "leases.json"
MAX_OPEN_BATCHES = 100  # of one key; without keys there is no limit
ABANDONED_S = 3600.0  # after which a queue entry without a batch is from a failed request
NEXT: Mapping[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "cancelling", "failed"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled", "failed"),
    "completed": (),
    "failed": (),
    "expired": (),
    "cancelled": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch, with the fields of OpenAI's object and those in HIDDEN. Times are Unix times in seconds."""

    id: str = field(default_factory=partial(ordered_id, "batch_"))
    endpoint: str
    model: str | None = None
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: JsonObject | None = None
    request_counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("total", "completed", "failed"), 0)
    )
    usage: JsonObject | None = None
    owner: str | None = None
    domain: str | None = None
    tenant: str | None = None

    @property
    def ended(self) -> bool:
        return not NEXT[self.status]

    @property
    def is_late(self) -> bool:
        return time.time() >= self.expires_at

    def moved(self, status: Status, at: int | None = None, **changes: Any) -> Batch:  # Any: fields
        assert status in NEXT[self.status], f"a batch that is {self.status} does not become {status}"
        stamp = int(time.time()) if at is None else at
        return replace(self, status=status, **{f"{status}_at": stamp}, **changes)

    def as_openai(self) -> JsonObject:
        shown = {name: value for name, value in asdict(self).items() if name not in HIDDEN}
        return {"id": self.id, "object": "batch"} | shown

    def to_json(self) -> JsonObject:
        return self.as_openai() | {name: getattr(self, name) for name in HIDDEN}


class BatchStore:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._owned = OwnerIndex(storage, FOLDER, "batch_")
        self._queue_owners = OwnerIndex(storage, FOLDER, "batch_")
        self._creating = threading.Lock()

    def create(self, batch: Batch) -> None:
        """Raises RateLimitError if the batch's key has too many that have not ended."""
        with self._creating:
            num_open = sum(owner == batch.owner for owner in self.queued().values())
            if batch.owner is not None and num_open >= MAX_OPEN_BATCHES:
                raise RateLimitError(
                    f"{num_open} batches of this API key have not ended, the maximum. Retry when one has "
                    "ended, or send more lines in each.",
                    param="input_file_id",
                )
            self.storage.write(f"{QUEUE}/{batch.id}", b"")  # first: a stored batch is always run
            self.save(batch)

    def get(self, batch_id: str, caller: Caller) -> Batch:
        batch = self.find(batch_id)
        if batch is None or not caller.may_see(batch.owner):
            raise NotFoundError(f"There is no batch {brief(batch_id)} here.", param="batch_id")
        return batch

    def find(self, batch_id: str) -> Batch | None:
        batch = self.saved(batch_id)
        if batch is None or batch.status not in ("validating", "in_progress"):
            return batch
        cancelling_at = self.cancel_requested_at(batch_id)
        return batch if cancelling_at is None else batch.moved("cancelling", cancelling_at)

    def saved(self, batch_id: str) -> Batch | None:
        found = read_object(self.storage, f"{FOLDER}/{batch_id}.json", "batch_", batch_id)
        return None if found is None else Batch(**{each.name: found[each.name] for each in fields(Batch)})

    def list(self, caller: Caller, *, limit: int, after: str | None) -> Page[Batch]:
        """Raises RequestError if `after` is not one of the caller's batches."""
        return page(self._owned.ids(caller, newest_first=True), after, limit, self.find)

    def cancel(self, batch_id: str, caller: Caller) -> Batch:
        """Raises NotFoundError as `get` does, RequestError if the batch has ended."""
        batch = self.get(batch_id, caller)
        if batch.ended or batch.status == "finalizing":
            raise RequestError(f"The batch {batch_id} is {batch.status}: it cannot be cancelled any more.")
        if batch.status != "cancelling":
            request_json = json.dumps({"cancelling_at": int(time.time())})
            self.storage.write(f"{FOLDER}/{batch_id}.cancel", request_json.encode())
        return self.get(batch_id, caller)

    def cancel_requested_at(self, batch_id: str) -> int | None:
        try:
            return int(json.loads(self.storage.read(f"{FOLDER}/{batch_id}.cancel"))["cancelling_at"])
        except FileNotFoundError:
            return None

    def queued(self) -> dict[str, str | None]:
        """Return the batches that have not ended, oldest first, with their owners."""
        ids = [entry.name.rpartition("/")[2] for entry in self.storage.entries(QUEUE)]
        owners = self._queue_owners.owners(ids)
        return {each: owners.get(each) for each in ids}

    def save(self, batch: Batch) -> None:
        self.storage.write(f"{FOLDER}/{batch.id}.json", json.dumps(batch.to_json()).encode())
        if batch.ended:
            self.remove_from_queue(batch.id)
            self.storage.remove(f"{FOLDER}/{batch.id}.cancel", f"{WORK}/{batch.id}/{LEASES}")

    def remove_from_queue(self, batch_id: str) -> None:
        self.storage.remove(f"{QUEUE}/{batch_id}")

    def drop_abandoned(self, batch_id: str) -> None:
        entry = self.storage.entry(f"{QUEUE}/{batch_id}")
        if entry is not None and time.time() - entry.modified_s > ABANDONED_S:
            self.remove_from_queue(batch_id)

    def leases(self, batch_id: str) -> JsonObject:
        try:
            return json.loads(self.storage.read(f"{WORK}/{batch_id}/{LEASES}"))
        except FileNotFoundError:
            return {}

    def save_leases(self, batch_id: str, leases: JsonObject) -> None:
        self.storage.write(f"{WORK}/{batch_id}/{LEASES}", json.dumps(leases).encode())

    def output_folder(self, batch_id: str) -> str:
        return f"{WORK}/{batch_id}/out"

    def output(self, batch_id: str) -> Storage:
        return self.storage.subfolder(self.output_folder(batch_id))
