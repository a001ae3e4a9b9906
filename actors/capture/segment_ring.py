"""A ring of segment files that holds captured traffic up to a size limit, removing the oldest first.

There are at most 16 segments of a sixteenth of the limit each. Replicas may share a folder: each writes a
segment of its own, which it keeps locked (flock), and removes the oldest one that no process writes when it
starts another. After a restart the newest segment without a writer is continued. Blocking.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ...cluster.errors import ConfigError
from ..system.atomic_files import open_own
from .records import segment_number, segment_path, segments

NUM_SEGMENTS = 16
_LOCK = ".lock"


class SegmentRing:
    """The segments of one folder, including the one that this process writes.

    `max_bytes` limits all segments together. Raises ConfigError if other users may read the folder, or it
    cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.segment_bytes = max_bytes // NUM_SEGMENTS
        self._folder = folder
        self._handle: int | None = None
        self._size = 0
        _make_private(folder)

    def append(self, line: bytes) -> bool:
        """Write a whole line; False if others write all segments. Raises OSError, undoing a partial write."""
        assert len(line) <= self.segment_bytes, "callers check the size"
        if not (self._has_room(line) or self._open_segment(line)):
            return False
        assert self._handle is not None
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(line)
        return True

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _has_room(self, line: bytes) -> bool:
        return self._handle is not None and self._size + len(line) <= self.segment_bytes

    def _open_segment(self, line: bytes) -> bool:
        is_start = self._handle is None
        self.close()
        with self._locked():
            paths = segments(self._folder)
            if is_start and self._continue_newest(paths) and self._has_room(line):
                return True
            self.close()
            for path in paths[:]:
                if len(paths) < NUM_SEGMENTS:
                    break
                if (handle := _lock_unless_used(path)) is not None:
                    path.unlink()
                    os.close(handle)
                    paths.remove(path)
            if len(paths) >= NUM_SEGMENTS:
                return False
            last = segment_number(paths[-1]) if paths else None
            path = segment_path(self._folder, (last or 0) + 1)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = 0
        return True

    def _continue_newest(self, paths: list[Path]) -> bool:
        """Open the newest segment that no process writes, and drop a last line without a newline."""
        for path in reversed(paths):
            if (handle := _lock_unless_used(path)) is not None:
                self._handle = handle
                self._size = path.read_bytes().rfind(b"\n") + 1
                os.ftruncate(handle, self._size)
                return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one process at a time to add or remove segments."""
        handle = open_own(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _lock_unless_used(path: Path) -> int | None:
    """Open and lock a segment; None if another process writes it."""
    try:
        handle = open_own(path, os.O_RDWR | os.O_APPEND)
    except OSError:  # a symbolic link, which may lead to another user's file
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(
            f"capture: {folder} cannot be created ({error.strerror}). Choose another folder with --capture.",
            param="capture",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"capture: other users may read {folder} (mode {mode:o}), but captured traffic is "
            f"private. Use chmod 700 {folder}, or choose a folder that does not exist yet.",
            param="capture",
        )
    if not usable:
        raise ConfigError(
            f"capture: {folder} cannot be written. Choose another folder with --capture.", param="capture"
        )
