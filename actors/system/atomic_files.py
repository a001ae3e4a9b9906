"""Files of our own: put in place whole, and opened without following links.

A folder that we write may have been prepared by another: no link in it is trusted, nor a name
(`cluster/safe_file_names.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
TEMPORARY = ".manta-tmp-"  # with a suffix of its own: pathlib's *.parquet matches names with a dot in front
_LONGEST = 180  # characters of a name that stand in its temporary name; file systems take 255 bytes


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A figure as it is written; null where there is none."""
    return None if value is None else round(value, digits)


def check_writable(folder: Path, param: str) -> None:
    """Make a private folder that a setting names. Raises ConfigError where nothing can be written there."""
    try:
        make_folder(folder, private=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{param}: {folder} cannot be written ({error.strerror}). Choose another folder with "
            f"--{param.replace('_', '-')}.",
            param=param,
        ) from None


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder and those above it; what is there stays as it is.

    Args:
        private: no other user may look into those that are made.
    """
    if not private:
        folder.mkdir(parents=True, exist_ok=True)
        return
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent, private=True)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file without following a link, neither symbolic nor hard; a FIFO does not block.

    Raises:
        OSError: also for what is no such file, with `strerror` saying so.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "it is a link, or no regular file", str(path))
    return handle


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_whole(
    path: Path,
    write: Callable[[Path], object],
    *,
    synced: bool = True,
    private: bool = False,
) -> None:
    """Write a file under a temporary name, make it durable, and give it its name.

    Args:
        write: writes the content to the path that it is given.
        synced: False leaves it to the system when the file reaches the disk.
        private: no other user may read it.
    """
    # No other writer has that name, and no link can wait there.
    temporary = path.with_name(f"{TEMPORARY}{path.name[:_LONGEST]}-{secrets.token_hex(8)}.part")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666))
        write(temporary)
        if private:
            temporary.chmod(PRIVATE_FILE)
        if synced:
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if synced:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename is durable when its folder is; some network file systems cannot promise it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
