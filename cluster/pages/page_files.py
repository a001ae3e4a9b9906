"""Files of K/V pages: a page's bytes by what they were computed from, for any process that computes the same.

    <path>/<subject>/<rank>/<group>-<digest>      a header, then the bytes of all planes

The subject is a hash of everything that the bytes depend on besides the tokens: checkpoints, dtypes, kernels,
page size. The digest is the prefix cache's: of the page's tokens and all before them, and of the key that
isolates users. So a file with a name has one possible content, and processes that share the folder need no
agreement: a file is written under another name and renamed, and never changed. A file that is torn, damaged,
of an older format or of another size is deleted where it is read, and its page is computed.

The files' times order them: the time of the last use plus the seconds for which the page is worth more than
others (`KVTier`). The files with the lowest times are deleted first, by one process at a time, also those of
other subjects. `max_bytes` bounds the whole folder.

The content is users' text in another form: the folder is its owner's alone (0700). Neither torch nor Ray.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..disk_cache import cache_folder
from ..errors import ConfigError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sIIQ")  # magic, group, checksum, bytes after it
_MAGIC = b"mantakv1"
_NAME = re.compile(r"\.?\d+-[0-9a-f]{32}(\.\d+)?")  # nothing else is counted or deleted
_MAX_BUFFERS = 1024  # Linux's limit of a vectored read or write
_SHARE_LEFT = 0.9  # of the bound, after files were deleted
_SHARE_UNCOUNTED = 0.05  # of the bound, that may be written until the folder is counted again
_TORN_AFTER_S = 60.0  # age of an unfinished file whose writer has died
_PAUSE_S = 60.0  # without writes, after one failed


@dataclass(frozen=True, slots=True)
class PageFolder:
    """The files of one rank of one subject; small, and sent to other processes."""

    path: Path

    def file(self, group: int, digest: bytes) -> Path:
        return self.path / f"{group}-{digest.hex()}"

    def has(self, group: int, digest: bytes) -> bool:
        return self.file(group, digest).exists()


def default_tier() -> Path:
    """Return the folder that kv_tier_path "auto" means; it may not exist yet."""
    return cache_folder() / "kv"


def open_tier(path: Path) -> None:
    """Create the folder of all subjects, for its owner alone.

    Raises ConfigError if it cannot be written, or others can use it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(
            f"kv_tier_path={str(path)!r} is not usable: {error.strerror}. Give a folder of this user.",
            param="kv_tier_path",
        ) from None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"kv_tier_path={str(path)!r} must belong to this user and be closed to others, because its files "
            f"are users' text in another form. Give a new folder, or: chmod 700 {path}",
            param="kv_tier_path",
        )


def clear_tier(path: Path) -> int:
    """Delete all pages in the folder, also while servers use it; return their bytes."""
    size = 0
    for file in _files(path):
        with suppress(FileNotFoundError):
            file.path.unlink()
            size += file.size
    return size


class PageFiles:
    """Reads and writes one rank's files. Not thread-safe.

    Args:
        tier: the folder of all subjects, made by `open_tier`.
        folder: within it.
        max_bytes: of the folder of all subjects.
    """

    def __init__(self, tier: Path, folder: PageFolder, max_bytes: int) -> None:
        self._tier, self.folder, self._max_bytes = tier, folder, max_bytes
        self._num_uncounted = max_bytes  # bytes written since the folder was counted: count before the first
        self._paused_until_s = 0.0

    def read(self, group: int, digest: bytes, buffers: Sequence[memoryview], keep_s: float) -> bool:
        """Read a page into its buffers; return whether they hold it now, else their content is undefined."""
        path = self.folder.file(group, digest)
        try:
            with _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
                reason = _read(file, group, buffers)
            if reason is None:
                _touch(path, keep_s)
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            reason = error.strerror or "cannot be read"
        logger.warning("a page of the K/V tier is not used, and computed: %s %s", path.name, reason)
        with suppress(OSError):
            path.unlink()
        return False

    def renew(self, group: int, digest: bytes, keep_s: float) -> bool:
        """Record a use of a page; return whether its file is there."""
        try:
            _touch(self.folder.file(group, digest), keep_s)
        except OSError:
            return False
        return True

    def write(self, group: int, digest: bytes, buffers: Sequence[memoryview], keep_s: float) -> bool:
        """Write a page unless it is there; return whether it is. `keep_s` is added to the file's time."""
        if self.renew(group, digest, keep_s):
            return True
        path = self.folder.file(group, digest)
        if time.monotonic() < self._paused_until_s:
            return False
        size = sum(map(len, buffers))
        try:
            self._make_room(size)
            self.folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with _opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as file:
                    _write(file, _HEADER.pack(_MAGIC, group, _checksum(buffers), size), buffers)
                _touch(new, keep_s)
                new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            logger.warning("pages are not written to the K/V tier for %g s: %s", _PAUSE_S, error)
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Delete unfinished files, and those worth least if `size` bytes more may exceed the bound."""
        self._num_uncounted += size
        if self._num_uncounted <= _SHARE_UNCOUNTED * self._max_bytes:
            return
        with _opened(self._tier / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a count takes milliseconds
            files = sorted(_files(self._tier), key=lambda file: file.worth_s)
            excess = sum(file.size for file in files) + size - int(_SHARE_LEFT * self._max_bytes)
            for file in files:
                if excess <= 0 and file.worth_s > 0.0:
                    break
                with suppress(FileNotFoundError):
                    file.path.unlink()
                excess -= file.size
        self._num_uncounted = 0


class _File(NamedTuple):
    path: Path
    size: int
    worth_s: float  # the lowest are deleted first


def _files(tier: Path) -> Iterator[_File]:
    """Yield all pages, and files that a dead process did not finish, which are worth nothing."""
    torn_before_s = time.time() - _TORN_AFTER_S
    for folder, _, names in os.walk(tier):
        if folder == str(tier):
            continue
        for name in filter(_NAME.fullmatch, names):
            path = Path(folder, name)
            with suppress(OSError):
                found = path.lstat()
                is_torn = name.startswith(".") and found.st_mtime < torn_before_s
                yield _File(path, found.st_size, 0.0 if is_torn else found.st_mtime)


def _read(file: int, group: int, buffers: Sequence[memoryview]) -> str | None:
    """Fill the buffers; return what is wrong with the file, if anything is."""
    size, found = sum(map(len, buffers)), os.fstat(file)
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    head = os.read(file, _HEADER.size)
    if len(head) != _HEADER.size or found.st_size != _HEADER.size + size:
        return "has another size"
    magic, of_group, checksum, of_size = _HEADER.unpack(head)
    if (magic, of_group, of_size) != (_MAGIC, group, size):
        return "has another format"
    for first in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[first : first + _MAX_BUFFERS]
        if os.readv(file, part) != sum(map(len, part)):
            return "could not be read whole"
    return None if _checksum(buffers) == checksum else "is damaged"


def _write(file: int, head: bytes, buffers: Sequence[memoryview]) -> None:
    """Raises OSError, also if the disk takes only a part."""
    parts = [memoryview(head), *buffers]
    for first in range(0, len(parts), _MAX_BUFFERS):
        part = parts[first : first + _MAX_BUFFERS]
        if os.writev(file, part) != sum(map(len, part)):
            raise OSError("the disk is full")


def _checksum(buffers: Sequence[memoryview]) -> int:
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value


def _touch(path: Path, keep_s: float) -> None:
    worth_s = time.time() + keep_s
    os.utime(path, (worth_s, worth_s), follow_symlinks=False)


@contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
