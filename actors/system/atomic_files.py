"""Writes files atomically, and opens them without following links.

Another user may have prepared a folder that we write to, so links and names in it are not trusted.
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
TEMPORARY = ".manta-tmp-"  # a prefix; pathlib's *.parquet also matches names with a leading dot
_LONGEST = 180  # characters of a name kept in its temporary name; file systems allow 255 bytes


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def check_storage_folder(folder: Path) -> None:
    """Create the private folder that `batch_storage` names. Raises ConfigError if it cannot be written."""
    try:
        make_folder(folder, private=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"batch_storage: {folder} cannot be written ({error.strerror}). Choose another folder with "
            "--batch-storage.",
            param="batch_storage",
        ) from None


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Create a folder and its parents, for this user alone if `private`; existing ones are not changed."""
    if not private:
        folder.mkdir(parents=True, exist_ok=True)
        return
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent, private=True)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file without following symbolic or hard links; a FIFO does not block.

    Raises OSError also if it is not a regular file, which `strerror` then says.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "it is a link, or no regular file", str(path))
    return handle


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_atomically(
    path: Path,
    write: Callable[[Path], object],
    *,
    synced: bool = True,
    private: bool = False,
) -> None:
    """Write a file under a temporary name, make it durable, and rename it.

    `synced`: False leaves it to the system when it reaches the disk. `private`: other users may not read it.
    """
    # No other writer uses this name, and no link can have been placed there.
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
    """Make a rename durable; some network file systems cannot guarantee it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
