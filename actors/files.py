"""Files in place whole: written under a temporary name, made durable, then given their name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TEMPORARY = ".manta-tmp-"  # with a suffix of its own: pathlib's *.parquet matches names with a dot in front


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A figure as it is written; null where there is none."""
    return None if value is None else round(value, digits)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_whole(
    path: Path,
    write: Callable[[Path], object],
    *,
    synced: bool = True,
) -> str:
    """Write a file under a temporary name, make it durable, and give it its name. Returns its SHA-256.

    Args:
        write: writes the content to the path that it is given.
        synced: False leaves it to the system when the file reaches the disk.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}.part")
    try:
        write(temporary)
        with temporary.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            if synced:
                os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if synced:
        _sync_folder(path.parent)
    return digest


def _sync_folder(folder: Path) -> None:
    """A rename is durable when its folder is; some network file systems cannot promise it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
