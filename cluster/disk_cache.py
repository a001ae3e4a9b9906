"""An on-disk cache of measurements: one small JSON file per kind of measurement and subject.

A missing file only means measuring again. So does one that cannot be read, is too old or is about another
subject, which is logged; a failure to write is logged once. The values are opaque here. Files are in
$MANTA_CACHE_DIR, else in `manta` in the user's cache folder. Called by `actors/engine/speculation_cache.py`
and by code that times alternatives at start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .json_text import parse_json

logger = logging.getLogger(__name__)

_MAX_AGE_S = 14 * 86400.0  # machines change without notice: clocks, neighbors, kernels
FOREVER_S = math.inf
_MAX_BYTES = 4 * 2**20


def cache_folder() -> Path:
    """Return the folder of everything that can be measured again; it may not exist yet."""
    if given := os.environ.get("MANTA_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta"


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

    def read(self) -> Any:  # Any: JSON
        """Return the value; None if there is no valid one."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_MAX_BYTES)
            content = parse_json(text)
            value, age_s = content["value"], time.time() - float(content["written_s"])
            same = content["subject"] == self._subject
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("cannot read %s, measuring again: %s", self.path, type(error).__name__)
            return None
        if not same or not 0.0 <= age_s <= self._max_age_s:
            reason = "is too old" if same else "is about another subject"
            logger.info("%s %s: measuring again", self.path, reason)
            return None
        return value

    def write(self, value: Any) -> None:  # Any: JSON
        """Replace the value atomically: other processes see the old file or the new one."""
        self._write(value, lambda new: new.replace(self.path))

    def write_once(self, value: Any) -> Any:  # Any: JSON
        """Write the value unless there is a valid one, and return the one that is there then.

        So all of several processes that measure at the same time use the first one's value.
        """
        kept = value

        def link(new: Path) -> None:
            nonlocal kept
            try:
                os.link(new, self.path)
            except FileExistsError:
                if (first := self.read()) is not None:
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
