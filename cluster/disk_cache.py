"""An on-disk cache of measurements: one small JSON file per kind of measurement and subject.

A missing file only means measuring again. So does one that is too old or is about another subject, which is
logged; a failure to write is logged once. A file that cannot be used (damaged, another user's, no file) is
deleted. Files are in $MANTA_CACHE_DIR, else in `manta` in the user's cache folder. Called by
`actors/engine/speculation_cache.py` and by code that times alternatives at start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from .json_text import parse_json

logger = logging.getLogger(__name__)

_MAX_AGE_S = 14 * 86400.0  # machines change without notice: clocks, neighbors, kernels
FOREVER_S = math.inf
_MAX_BYTES = 4 * 2**20
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, ArithmeticError)

T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder of everything that can be measured again; it may not exist yet."""
    if given := os.environ.get("MANTA_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta"


def read_own_file(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of a file of the cache, which other users may have prepared.

    Raises OSError, also unless it is a plain file of this user or root that not every user may write.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("no plain file")
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & stat.S_IWOTH:
            raise PermissionError("other users may write it")
        return stream.read(max_bytes)


class DiskCache:
    """One cached measurement.

    Args:
        name: one word for what was measured; part of the file's name.
        cache_key: what it was measured for. Another subject has another file.
        max_age_s: an older value is measured again.
    """

    def __init__(
        self,
        name: str,
        cache_key: Mapping[str, str | int | float | None],
        max_age_s: float = _MAX_AGE_S,
    ) -> None:
        self._subject, self._max_age_s = dict(cache_key), max_age_s
        key = json.dumps(self._subject, sort_keys=True)
        self.path = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        self._logs_failure = True

    def read(self, use: Callable[[Any], T]) -> T | None:  # Any: JSON
        """Return `use` of the value; None if there is no valid one.

        `use` checks the value: where it raises ValueError, TypeError, KeyError or ArithmeticError, the file
        is deleted.
        """
        try:
            content = parse_json(read_own_file(self.path, _MAX_BYTES))
            value, age_s = content["value"], time.time() - float(content["written_s"])
            same = content["subject"] == self._subject
            if same and 0.0 <= age_s <= self._max_age_s:
                return use(value)
        except FileNotFoundError:
            return None
        except _UNUSABLE as error:
            reason = str(error)[:200] or type(error).__name__
            logger.warning("cannot use %s, measuring again: %s", self.path, reason)
            with suppress(OSError):
                self.path.unlink()
            return None
        reason = "is too old" if same else "is about another subject"
        logger.info("%s %s: measuring again", self.path, reason)
        return None

    def write(self, value: Any) -> None:  # Any: JSON
        """Replace the value atomically: other processes see the old file or the new one."""
        self._write(value, lambda new: new.replace(self.path))

    def write_once(self, value: T, use: Callable[[Any], T]) -> T:  # Any: JSON
        """Write the value unless there is a valid one (`use`: as in `read`), and return the one there then.

        So all of several processes that measure at the same time use the first one's value.
        """
        kept = value

        def link(new: Path) -> None:
            nonlocal kept
            try:
                os.link(new, self.path)
            except FileExistsError:
                if (first := self.read(use)) is not None:
                    kept = first
                else:
                    new.replace(self.path)
            new.unlink(missing_ok=True)

        self._write(value, link)
        return kept

    def _write(self, value: Any, move: Callable[[Path], object]) -> None:  # Any: JSON
        """Write a new file beside the cached one and move it there; log the first failure."""
        text = json.dumps({"subject": self._subject, "written_s": time.time(), "value": value})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(text)
            move(Path(file.name))
        except OSError as error:
            if self._logs_failure:
                logger.warning("cannot cache measurements: %s (set MANTA_CACHE_DIR)", error)
            self._logs_failure = False
