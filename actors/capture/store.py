"""A ring of segment files: as much captured traffic as a bound allows; the oldest goes first.

A segment is at most a sixteenth of the bound and there are never more than sixteen, so the bound holds at any
moment. Replicas may share a folder: each writes a segment of its own, locked as long as it does (flock), and
whoever begins another removes the oldest that nobody writes. What a killed process left is gone on with.
Called by `writer.py`; blocking.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ...cluster.errors import ConfigError
from ..files import open_own
from .records import segment_number, segment_path, segments

NUM_SEGMENTS = 16
_LOCK = ".lock"


class SegmentRing:
    """The segments of one folder, and the one that is written here.

    Args:
        folder: made if it is not there; nobody but its owner may look into it.
        max_bytes: of all segments together.

    Raises:
        ConfigError: others may look into the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.segment_bytes = max_bytes // NUM_SEGMENTS
        self._folder = folder
        self._handle: int | None = None
        self._size = 0
        _make_private(folder)

    def append(self, line: bytes) -> bool:
        """Write a whole line of at most `segment_bytes`.

        False if there is no room: others write all the segments. Raises OSError; nothing is written then.
        """
        assert len(line) <= self.segment_bytes, "whoever calls has looked"
        if not (self._has_room(line) or self._turn(line)):
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
        """Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _has_room(self, line: bytes) -> bool:
        return self._handle is not None and self._size + len(line) <= self.segment_bytes

    def _turn(self, line: bytes) -> bool:
        """Go on with a segment that was left, at the start, or begin another; False if there is no room."""
        is_start = self._handle is None
        self.close()
        with self._alone():
            found = segments(self._folder)
            if is_start and self._adopt(found) and self._has_room(line):
                return True
            self.close()
            for path in found[:]:
                if len(found) < NUM_SEGMENTS:
                    break
                if (handle := _unused(path)) is not None:
                    path.unlink()
                    os.close(handle)
                    found.remove(path)
            if len(found) >= NUM_SEGMENTS:
                return False
            last = segment_number(found[-1]) if found else None
            path = segment_path(self._folder, (last or 0) + 1)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = 0
        return True

    def _adopt(self, found: list[Path]) -> bool:
        """Take the newest that nobody writes; a line without an end is cut off."""
        for path in reversed(found):
            if (handle := _unused(path)) is not None:
                self._handle = handle
                self._size = path.read_bytes().rfind(b"\n") + 1
                os.ftruncate(handle, self._size)
                return True
        return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While segments come and go, one process at a time."""
        handle = open_own(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _unused(path: Path) -> int | None:
    """A handle of a segment that nobody writes, locked; None if somebody does."""
    try:
        handle = open_own(path, os.O_RDWR | os.O_APPEND)
    except OSError:  # a link, which leads to somebody else's
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
            f"capture: {folder} cannot be made ({error.strerror}). Choose another folder with --capture.",
            param="capture",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"capture: others may look into {folder} (mode {mode:o}), and what people write to a model is "
            f"private. Use chmod 700 {folder}, or choose a folder that is not there yet.",
            param="capture",
        )
    if not usable:
        raise ConfigError(
            f"capture: {folder} cannot be written. Choose another folder with --capture.", param="capture"
        )
