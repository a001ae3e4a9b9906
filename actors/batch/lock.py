"""One job at a time writes an output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Protocol

from ...cluster.errors import ConfigError, InUseError
from .parts import FOLDER
from .storage import Storage

LOCK = f"{FOLDER}/lock"


class Lock(Protocol):
    """An output that is ours."""

    @property
    def held(self) -> bool:
        """Nobody has taken it over meanwhile."""
        ...

    def close(self) -> None:
        """Give it back. Idempotent."""
        ...


def lock(output: Storage) -> Lock:
    """Lock an output. Raises InUseError when another job holds it, ConfigError when it cannot be locked."""
    assert output.local
    return FileLock(output)


class FileLock:
    """On a disk: the system's lock of a file, which dies with its process."""

    def __init__(self, output: Storage) -> None:
        self._path = Path(output.path(LOCK))
        self._file = _locked(output, self._path)
        self._file.truncate(0)
        self._file.write(json.dumps(holder()))
        self._file.flush()

    @property
    def held(self) -> bool:
        return not self._file.closed

    def close(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # only if there is nothing else in it
            self._file.close()


def holder() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since_s": round(time.time())}


def in_use(output: Storage, content: str | bytes) -> InUseError:
    """Somebody else holds the output; who, as far as is known."""
    try:
        other = json.loads(content)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["since_s"]))
        who = f" (process {other['pid']} on {other['host']}, since {since})"
    except (ValueError, KeyError, TypeError):
        who = ""
    return InUseError(
        f"output: {output.where} is being written by another job{who}. Wait for its end, or choose another "
        "output.",
        param="output",
    )


def _locked(output: Storage, path: Path) -> IO[str]:
    """The locked file. A lock whose file was removed meanwhile locks nothing: try again."""
    while True:
        file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"output: {output.where} cannot be written: {error.strerror}. Choose another with --output.",
                param="output",
            ) from None
        if file is None:  # the folder went with somebody else's lock
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            held_by = file.read()
            file.close()
            raise in_use(output, held_by) from None
        except OSError as error:
            file.close()
            raise ConfigError(
                f"output: {output.where} cannot be locked ({error.strerror}), and two jobs must not write "
                "one folder. Choose a folder on another file system.",
                param="output",
            ) from None
        if _stands_at(path, file):
            return file
        file.close()


def _stands_at(path: Path, file: IO[str]) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
