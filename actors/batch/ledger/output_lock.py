"""Allows one job at a time to write an output.

On a disk this is `flock` on a file, which ends with its process. In an object store each job writes its own
claim and then lists others: two jobs that both write before they list cannot miss each other. A claim is
rewritten every few seconds, its age is measured by the store's own times, and one that is not rewritten is
taken over. Two jobs that start at once may both be rejected, but never both continue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeAlias

from ....cluster.errors import ConfigError, InUseError
from ...system.atomic_files import PRIVATE_FILE, make_folder, open_own
from ..dataset.storage import Entry, Storage
from .output_parts import FOLDER

LOCK = f"{FOLDER}/lock"
CLAIM_PREFIX = f"{FOLDER}/lock-"
HEARTBEAT_S = 5.0
DEAD_S = 15.0  # a claim not rewritten for this long belongs to a dead job
POLL_S = 1.0


def lock(output: Storage, say: Callable[[str], object]) -> Lock:
    """Raises InUseError, ConfigError. `say` reports a wait: in an object store up to 15 s after a kill."""
    return FileLock(output) if output.local else LockClaim(output, say)


class FileLock:
    def __init__(self, output: Storage) -> None:
        self._path = Path(output.root) / LOCK
        self._file = _locked(output, self._path)
        self._file.truncate(0)
        self._file.write(_holder())
        self._file.flush()

    @property
    def is_held(self) -> bool:
        """False once another job has taken the output over."""
        return not self._file.closed and _is_same_file(self._path, self._file)

    def close(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # fails if it is not empty
            self._file.close()


class LockClaim:
    """An object in a store, rewritten by a thread."""

    def __init__(self, output: Storage, say: Callable[[str], object]) -> None:
        self._output = output
        self._name = f"{CLAIM_PREFIX}{uuid.uuid4().hex}.json"
        self._content = _holder().encode()
        self._lost = False
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._heartbeat, name="manta-claim", daemon=True)
        try:
            output.write(self._name, self._content)
        except OSError as error:
            raise ConfigError(
                f"output: {output.where} cannot be written: {error}. Choose another with --output.",
                param="output",
            ) from None
        self._beating.start()
        try:
            self._wait_for_other_claims(say)
        except BaseException:
            self.close()
            raise

    @property
    def is_held(self) -> bool:
        return not (self._lost or self._closing.is_set())

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._beating.join()
            with contextlib.suppress(OSError):
                self._output.remove(self._name)

    def _heartbeat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # retried at the next beat
                if self._output.entry(self._name) is None:
                    self._lost = True
                    return
                self._output.write(self._name, self._content)

    def _wait_for_other_claims(self, say: Callable[[str], object]) -> None:
        """Wait until no other claim is alive. Raises InUseError if one is rewritten."""
        first = self._others()
        if first:
            say(
                f"{self._output.where} was claimed by another job{self._describe_others(first)}: waiting "
                f"up to {DEAD_S:.0f} s to see whether it lives"
            )
        others, deadline_s = first, time.monotonic() + DEAD_S
        while others:
            if any(name not in first or entry != first[name] for name, entry in others.items()):
                raise _in_use(self._output, self._describe_others(others))
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
            others = self._others()
        self._output.remove(*others)

    def _others(self) -> dict[str, Entry]:
        entries = self._output.entries(FOLDER)
        return {
            entry.name: entry
            for entry in entries
            if entry.name.startswith(CLAIM_PREFIX) and entry.name != self._name
        }

    def _describe_others(self, others: dict[str, Entry]) -> str:
        with contextlib.suppress(OSError):
            return _describe_holder(self._output.read(next(iter(others))))
        return ""


Lock: TypeAlias = FileLock | LockClaim


def _holder() -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since_s": round(time.time())})


def _describe_holder(holder: str | bytes) -> str:
    try:
        info = json.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info["since_s"]))
        return f" (process {info['pid']} on {info['host']}, since {since})"
    except (ValueError, KeyError, TypeError):
        return ""


def _in_use(output: Storage, holder: str) -> InUseError:
    return InUseError(
        f"output: {output.where} is being written by another job{holder}. Wait for its end, or choose "
        "another output.",
        param="output",
    )


def _locked(output: Storage, path: Path) -> IO[str]:
    """Return the locked file. Retries if the file was removed meanwhile, since locking it has no effect."""
    while True:
        file = None
        try:
            output.path(LOCK)  # raises if it is a link
            make_folder(path.parent, private=output.private)
            with contextlib.suppress(FileNotFoundError):
                handle = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
                file = os.fdopen(handle, "a+", encoding="utf-8")
                if output.private:
                    os.fchmod(file.fileno(), PRIVATE_FILE)
        except OSError as error:
            raise ConfigError(
                f"output: {output.where} cannot be written: {error.strerror}. Choose another with --output.",
                param="output",
            ) from None
        if file is None:  # another job removed the folder with its lock
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = _describe_holder(file.read())
            file.close()
            raise _in_use(output, holder) from None
        except OSError as error:
            file.close()
            raise ConfigError(
                f"output: {output.where} cannot be locked ({error.strerror}), and two jobs must not write "
                "one folder. Choose a folder on another file system.",
                param="output",
            ) from None
        if _is_same_file(path, file):
            return file
        file.close()


def _is_same_file(path: Path, file: IO[str]) -> bool:
    try:
        return path.lstat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
