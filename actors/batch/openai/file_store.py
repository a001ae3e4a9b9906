"""Stored files of `/v1/files`: uploads, and the outputs of batches, on any storage.

    files/<id>.jsonl    the content of an upload
    files/<id>.json     its object: OpenAI's fields, the owner, and the pieces of the content

The object is written last, which makes the file exist. An output is not copied: its pieces are the parts of
the batch's ledger. A file that a caller (`cluster/request/caller.py`) may not see does not exist for it.
Blocking.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa

from ....cluster.errors import NotFoundError, QuotaError, RequestError, brief
from ....cluster.request.caller import Caller
from ....cluster.safe_file_names import inner_name
from ..dataset.storage import Storage
from ..ledger.output_parts import PART_NAME

CHUNK_BYTES = 1 << 20
MIN_BYTES = 4096  # minimum that a file counts against a quota: an empty one takes space too
READS_AT_ONCE = 16  # for objects of a list; an object store answers each after tens of milliseconds
READ_ATTEMPTS = 5  # a file may be replaced between the requests for its size and its bytes
STALE_FILE_S = 3600.0  # after which a half-written file is abandoned
FOLDER = "files"
ID = re.compile(r"(file-|batch_)[0-9A-Za-z]{1,64}")
PIECE = re.compile(rf"{FOLDER}/{ID.pattern}\.jsonl|work/{ID.pattern}/out/{PART_NAME.pattern}")

JsonObject = dict[str, Any]  # Any: JSON
T = TypeVar("T")


def ordered_id(prefix: str, at_s: float | None = None, digest: str | None = None) -> str:
    """Return an id; ids sort by time, so lists need no index. Without a time and a digest it is a new one."""
    microseconds = int((time.time() if at_s is None else at_s) * 1e6)
    return f"{prefix}{microseconds:014x}{digest[:18] if digest else secrets.token_hex(9)}"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    pieces: tuple[str, ...]  # names in the storage; their concatenated contents are the file's
    owner: str | None = None  # digest of the key that uploaded it; None without keys

    def as_openai(self) -> JsonObject:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of one storage. `max_owner_bytes`: limit for all files of one owner; None is no limit."""

    def __init__(self, storage: Storage, max_owner_bytes: int | None = None) -> None:
        self.storage = storage
        self._owned = OwnerIndex(storage, FOLDER, "file-")
        self._max_owner_bytes = max_owner_bytes
        self._arriving: Counter[str] = Counter()  # bytes by owner, guarded by the lock
        self._lock = threading.Lock()

    def upload(
        self, filename: str, purpose: str, content: bytes | pa.Buffer, owner: str | None = None
    ) -> StoredFile:
        file_id = ordered_id("file-")
        name = f"{FOLDER}/{file_id}.jsonl"
        size = len(memoryview(content))
        with self._reserve(owner, max(size, MIN_BYTES)):
            self.storage.write(name, content)
            return self.put(file_id, filename, purpose, (name,), created_at=int(time.time()), owner=owner)

    def check_quota(self, owner: str | None) -> None:
        if owner is not None and self._max_owner_bytes is not None:
            used = self._owned.num_bytes(owner)
            if used >= self._max_owner_bytes:
                raise self._full("input_file_id", "There is no space for output", used)

    @contextmanager
    def _reserve(self, owner: str | None, size: int) -> Iterator[None]:
        """Count a file against the quota while it is written. Other replicas do not see this."""
        if owner is None or self._max_owner_bytes is None:
            yield
            return
        with self._lock:
            used = self._owned.num_bytes(owner) + self._arriving[owner]
            if used + size > self._max_owner_bytes:
                raise self._full("file", f"Its {size} bytes do not fit", used)
            self._arriving[owner] += size
        try:
            yield
        finally:
            with self._lock:
                self._arriving[owner] -= size

    def _full(self, param: str, what: str, used: int) -> QuotaError:
        return QuotaError(
            f"{param}: {what}: this key keeps {used} of {self._max_owner_bytes} bytes (max_stored_bytes). "
            "Delete files that are no longer needed (DELETE /v1/files/ID).",
            param=param,
        )

    def put(
        self,
        file_id: str,
        filename: str,
        purpose: str,
        pieces: Sequence[str],
        *,
        created_at: int,
        owner: str | None,
    ) -> StoredFile:
        entries = [self.storage.entry(piece) for piece in pieces]
        size = sum(entry.size for entry in entries if entry is not None)
        file = StoredFile(file_id, filename, purpose, size, created_at, tuple(pieces), owner)
        content = file.as_openai() | {"pieces": file.pieces, "owner": owner}
        self.storage.write(f"{FOLDER}/{file_id}.json", json.dumps(content).encode())
        return file

    def get(self, file_id: str, caller: Caller) -> StoredFile:
        file = self._read(file_id)
        if file is None or not caller.may_see(file.owner):
            raise NotFoundError(f"There is no file {brief(file_id)} here.", param="file_id")
        return file

    def list(
        self, caller: Caller, *, purpose: str | None, limit: int, after: str | None, newest_first: bool
    ) -> Page[StoredFile]:
        ids = self._owned.ids(caller, newest_first=newest_first)

        def wanted(file_id: str) -> StoredFile | None:
            file = self._read(file_id)
            return file if file is not None and purpose in (None, file.purpose) else None

        return page(ids, after, limit, wanted)

    def chunks(self, file: StoredFile) -> Iterator[bytes]:
        for piece in file.pieces:
            with self.storage.reader(piece) as reader:
                while chunk := reader.read(CHUNK_BYTES):
                    yield chunk

    def delete(self, file: StoredFile) -> None:
        self.storage.remove(f"{FOLDER}/{file.id}.json", *file.pieces)

    def remove_leftovers(self) -> None:
        for folder in (FOLDER, "batches", "queue"):
            self.storage.remove_leftovers(folder, STALE_FILE_S)

    def _read(self, file_id: str) -> StoredFile | None:
        found = read_object(self.storage, f"{FOLDER}/{file_id}.json", "file-", file_id)
        if found is None:
            return None
        own = {name: found[name] for name in ("id", "filename", "purpose", "bytes", "created_at")}
        pieces = tuple(inner_name(piece, PIECE) for piece in found["pieces"])
        return StoredFile(**own, pieces=pieces, owner=found.get("owner"))


class OwnerIndex:
    """Caches owner and size of objects, so that listing one owner's does not read all owners'."""

    def __init__(self, storage: Storage, folder: str, prefix: str) -> None:
        self._storage, self._folder, self._prefix = storage, folder, prefix
        self._known: dict[str, tuple[str | None, int]] = {}  # replaced as a whole: threads read it

    def ids(self, caller: Caller, *, newest_first: bool) -> list[str]:
        ids = listed_ids(self._storage, self._folder, newest_first=newest_first)
        if caller.sees_all:
            return ids
        known = self._facts(ids)
        return [each for each in ids if each in known and caller.may_see(known[each][0])]

    def owners(self, ids: Sequence[str]) -> dict[str, str | None]:
        """Return the owners of objects; only these stay cached. Ids without an object are left out."""
        return {each: owner for each, (owner, _) in self._facts(ids).items()}

    def num_bytes(self, owner: str) -> int:
        known = self._facts(listed_ids(self._storage, self._folder, newest_first=False))
        return sum(size for of, size in known.values() if of == owner)

    def _facts(self, ids: Sequence[str]) -> dict[str, tuple[str | None, int]]:
        known, new = self._known, [each for each in ids if each not in self._known]
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            objects = dict(zip(new, pool.map(self._read, new), strict=True)) if new else {}
        fresh = {
            each: (found.get("owner"), max(found.get("bytes", 0), MIN_BYTES))
            for each, found in objects.items()
            if found is not None
        }
        both = known | fresh
        self._known = {each: both[each] for each in ids if each in both}
        return self._known

    def _read(self, id: str) -> JsonObject | None:
        return read_object(self._storage, f"{self._folder}/{id}.json", self._prefix, id)


def read_object(storage: Storage, name: str, prefix: str, given_id: str) -> JsonObject | None:
    """Return the JSON object of an id; None if there is none, or the id is malformed (it becomes a path).

    Raises ValueError if the file is not this object, OSError if it cannot be read.
    """
    if not given_id.startswith(prefix) or not ID.fullmatch(given_id):
        return None
    for attempt in range(1, READ_ATTEMPTS + 1):
        try:
            found = json.loads(storage.read(name))
            if not isinstance(found, dict) or found.get("id") != given_id:
                raise ValueError(f"{name} is not the object {given_id}")
            return found
        except FileNotFoundError:
            return None
        except (ValueError, OSError):  # it may have been replaced meanwhile
            if attempt == READ_ATTEMPTS:
                raise
    return None


def listed_ids(storage: Storage, folder: str, *, newest_first: bool) -> list[str]:
    names = [entry.name.rpartition("/")[2] for entry in storage.entries(folder)]
    ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(ids, reverse=newest_first)


def page(ids: Sequence[str], after: str | None, limit: int, read: Callable[[str], T | None]) -> Page[T]:
    """Return at most `limit` items after an id; those that `read` returns None for are skipped."""
    if after is not None and after not in ids:
        raise RequestError(f"after={brief(after)} is no id of this list.", param="after")
    remaining = ids[ids.index(after) + 1 :] if after is not None else ids
    found: list[T] = []
    at_once = max(READS_AT_ONCE, limit + 1)
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        while remaining and len(found) <= limit:
            some, remaining = remaining[:at_once], remaining[at_once:]
            found += [each for each in pool.map(read, some) if each is not None]
    return Page(found[:limit], len(found) > limit)
