"""Files of `/v1/files`: what was uploaded, and the outputs of batches, on any storage.

    files/<id>.jsonl    the content of an upload
    files/<id>.json     its paper: OpenAI's object, whose it is, and which pieces the content is made of

The paper is written last: a file is there when its paper is. An output is not copied: its pieces are the
part files that the batch's ledger counted. All state is in the storage, so that any replica answers. For a
caller (`cluster/caller.py`) that may not see a file it is not there.
Blocking: called in threads, by the routes (`http/files.py`) and by whoever works a batch off (`service.py`).
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

from ...cluster.caller import Caller
from ...cluster.errors import NotFoundError, QuotaError, RequestError, shown
from ...cluster.inner_names import inner_name
from .parts import PART_NAME
from .storage import Storage

CHUNK_BYTES = 1 << 20
LEAST_BYTES = 4096  # that a file counts: an empty one takes room, too
READS_AT_ONCE = 16  # papers of a list; an object store answers each after tens of milliseconds
READ_ATTEMPTS = 5  # a store is asked for the size first, and then for as many bytes
LEFT_OVER_S = 3600.0  # a file that was being written for so long is not written any more
FOLDER = "files"
ID = re.compile(r"(file-|batch_)[0-9A-Za-z]{1,64}")
PIECE = re.compile(rf"{FOLDER}/{ID.pattern}\.jsonl|work/{ID.pattern}/out/{PART_NAME.pattern}")

JsonObject = dict[str, Any]  # Any: JSON
T = TypeVar("T")


def ordered_id(prefix: str, at_s: float | None = None) -> str:
    """A new id; ids sort as their times do, so that lists need no index."""
    return f"{prefix}{_microseconds(at_s)}{secrets.token_hex(9)}"


def derived_id(prefix: str, at_s: float, digest: str) -> str:
    """The same shape of id, and the same id whenever it is asked for: the end of a batch may be redone."""
    return f"{prefix}{_microseconds(at_s)}{digest[:18]}"


def _microseconds(at_s: float | None) -> str:
    return f"{int((time.time() if at_s is None else at_s) * 1e6):014x}"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of a list, and whether more come after them."""

    items: list[T]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's paper.

    Attributes:
        pieces: names in the storage, whose contents follow one another.
        owner: the key that it came by, as a digest; None without keys.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    pieces: tuple[str, ...]
    owner: str | None = None

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
    """The files of one storage.

    Args:
        max_owner_bytes: that one owner's files may hold; None is no limit.
    """

    def __init__(self, storage: Storage, max_owner_bytes: int | None = None) -> None:
        self.storage = storage
        self._owned = Owned(storage, FOLDER, "file-")
        self._max_owner_bytes = max_owner_bytes
        self._arriving: Counter[str] = Counter()  # bytes by owner, guarded by the lock
        self._lock = threading.Lock()

    def upload(
        self, filename: str, purpose: str, content: bytes | pa.Buffer, owner: str | None = None
    ) -> StoredFile:
        """Keep what was uploaded. Raises OSError when it cannot be written, QuotaError."""
        file_id = ordered_id("file-")
        name = f"{FOLDER}/{file_id}.jsonl"
        size = len(memoryview(content))
        with self._room_for(owner, max(size, LEAST_BYTES)):
            self.storage.write(name, content)
            return self.put(file_id, filename, purpose, (name,), created_at=int(time.time()), owner=owner)

    def check_room(self, owner: str | None, param: str) -> None:
        """Raise QuotaError, which names `param`, where an owner's files fill all that it has."""
        if owner is not None and self._max_owner_bytes is not None:
            used = self._owned.num_bytes(owner)
            if used >= self._max_owner_bytes:
                raise self._full(param, "There is no room for output", used)

    @contextmanager
    def _room_for(self, owner: str | None, size: int) -> Iterator[None]:
        """Hold room for a file while it is written. Other replicas do not know of it."""
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
        """Make a file of pieces that are in the storage; the same file again is no error."""
        entries = [self.storage.entry(piece) for piece in pieces]
        size = sum(entry.size for entry in entries if entry is not None)
        file = StoredFile(file_id, filename, purpose, size, created_at, tuple(pieces), owner)
        paper = file.as_openai() | {"pieces": file.pieces, "owner": owner}
        self.storage.write(f"{FOLDER}/{file_id}.json", json.dumps(paper).encode())
        return file

    def get(self, file_id: str, caller: Caller) -> StoredFile:
        """Return a file. Raises NotFoundError where the caller may see none of that id."""
        file = self._read(file_id)
        if file is None or not caller.may_see(file.owner):
            raise NotFoundError(f"There is no file {shown(file_id)} here.", param="file_id")
        return file

    def list(
        self, caller: Caller, *, purpose: str | None, limit: int, after: str | None, newest_first: bool
    ) -> Page[StoredFile]:
        """The caller's files by their time. Raises RequestError when `after` is no id of theirs."""
        ids = self._owned.ids(caller, newest_first=newest_first)

        def wanted(file_id: str) -> StoredFile | None:
            file = self._read(file_id)
            return file if file is not None and purpose in (None, file.purpose) else None

        return page(ids, after, limit, wanted)

    def chunks(self, file: StoredFile) -> Iterator[bytes]:
        """The file's content, a piece of it at a time."""
        for piece in file.pieces:
            with self.storage.reader(piece) as reader:
                while chunk := reader.read(CHUNK_BYTES):
                    yield chunk

    def delete(self, file: StoredFile) -> None:
        self.storage.remove(f"{FOLDER}/{file.id}.json", *file.pieces)

    def remove_leftovers(self) -> None:
        """Remove what killed replicas have left half written, of files and batches."""
        for folder in (FOLDER, "batches", "queue"):
            self.storage.remove_leftovers(folder, LEFT_OVER_S)

    def _read(self, file_id: str) -> StoredFile | None:
        paper = read_paper(self.storage, f"{FOLDER}/{file_id}.json", "file-", file_id)
        if paper is None:
            return None
        fields = ("id", "filename", "purpose", "bytes", "created_at")
        own = {name: paper[name] for name in fields}
        pieces = tuple(inner_name(piece, PIECE) for piece in paper["pieces"])
        return StoredFile(**own, pieces=pieces, owner=paper.get("owner"))


class Owned:
    """Remembers the owner and the size of each paper in a folder; neither changes.

    Without it a list of one owner's objects, and the sum of their bytes, would read the papers of all owners.
    """

    def __init__(self, storage: Storage, folder: str, prefix: str) -> None:
        self._storage, self._folder, self._prefix = storage, folder, prefix
        self._known: dict[str, tuple[str | None, int]] = {}  # replaced as a whole: threads read it

    def ids(self, caller: Caller, *, newest_first: bool) -> list[str]:
        """Return the ids that a caller may see."""
        ids = listed_ids(self._storage, self._folder, newest_first=newest_first)
        if caller.sees_all:
            return ids
        known = self._facts(ids)
        return [each for each in ids if each in known and caller.may_see(known[each][0])]

    def num_bytes(self, owner: str) -> int:
        """Return the bytes that an owner's papers count together."""
        known = self._facts(listed_ids(self._storage, self._folder, newest_first=False))
        return sum(size for of, size in known.values() if of == owner)

    def _facts(self, ids: Sequence[str]) -> dict[str, tuple[str | None, int]]:
        known, new = self._known, [each for each in ids if each not in self._known]
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            papers = dict(zip(new, pool.map(self._paper, new), strict=True)) if new else {}
        fresh = {
            each: (paper.get("owner"), max(paper.get("bytes", 0), LEAST_BYTES))
            for each, paper in papers.items()
            if paper is not None
        }
        both = known | fresh
        self._known = {each: both[each] for each in ids if each in both}
        return self._known

    def _paper(self, id: str) -> JsonObject | None:
        return read_paper(self._storage, f"{self._folder}/{id}.json", self._prefix, id)


def read_paper(storage: Storage, name: str, prefix: str, given_id: str) -> JsonObject | None:
    """The JSON of an id; None for what is not there, or cannot be an id of ours (it becomes a path).

    Raises:
        ValueError: what is there is another's.
        OSError: it cannot be read.
    """
    if not given_id.startswith(prefix) or not ID.fullmatch(given_id):
        return None
    for attempt in range(1, READ_ATTEMPTS + 1):
        try:
            paper = json.loads(storage.read(name))
            if not isinstance(paper, dict) or paper.get("id") != given_id:
                raise ValueError(f"{name} does not tell of {given_id}")
            return paper
        except FileNotFoundError:
            return None
        except (ValueError, OSError):  # written anew between the asking for its size and the reading
            if attempt == READ_ATTEMPTS:
                raise
    return None


def listed_ids(storage: Storage, folder: str, *, newest_first: bool) -> list[str]:
    """The ids whose papers are in a folder."""
    names = [entry.name.rpartition("/")[2] for entry in storage.entries(folder)]
    ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(ids, reverse=newest_first)


def page(ids: Sequence[str], after: str | None, limit: int, read: Callable[[str], T | None]) -> Page[T]:
    """What comes after an id: at most `limit` of what `read` finds; None is passed over."""
    if after is not None and after not in ids:
        raise RequestError(f"after={shown(after)} is no id of this list.", param="after")
    left = ids[ids.index(after) + 1 :] if after is not None else ids
    found: list[T] = []
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        while left and len(found) <= limit:
            some, left = left[: max(READS_AT_ONCE, limit + 1)], left[max(READS_AT_ONCE, limit + 1) :]
            found += [each for each in pool.map(read, some) if each is not None]
    return Page(found[:limit], len(found) > limit)
