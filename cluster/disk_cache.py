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
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MAX_AGE_S = 14 * 86400.0  # machines change without notice: clocks, neighbors, kernels
_MAX_BYTES = 4 * 2**20


def cache_folder() -> Path:
    """Return the folder of everything that can be measured again; it may not exist yet."""
    if given := os.environ.get("MANTA_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta"


class DiskCache:
    """One cached measurement `name` of the subject `cache_key`, in a file of its own."""

    def __init__(self, name: str, cache_key: Mapping[str, str | int | float | None]) -> None:
        self._subject = dict(cache_key)
        key = json.dumps(self._subject, sort_keys=True)
        self.path = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        self._logs_failure = True

    def read(self) -> Any:  # Any: JSON
        """Return the value; None if there is no valid one."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_MAX_BYTES)
            content = json.loads(text)
            value, age_s = content["value"], time.time() - float(content["written_s"])
            same = content["subject"] == self._subject
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("cannot read %s, measuring again: %s", self.path, type(error).__name__)
            return None
        if not same or not 0.0 <= age_s <= _MAX_AGE_S:
            reason = "is too old" if same else "is about another subject"
            logger.info("%s %s: measuring again", self.path, reason)
            return None
        return value

    def write(self, value: Any) -> None:  # Any: JSON
        """Replace the value atomically: other processes see the old file or the new one."""
        text = json.dumps({"subject": self._subject, "written_s": time.time(), "value": value})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(text)
            Path(file.name).replace(self.path)
        except OSError as error:
            if self._logs_failure:
                logger.warning("cannot cache measurements: %s (set MANTA_CACHE_DIR)", error)
            self._logs_failure = False
