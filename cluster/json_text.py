"""Reads JSON that strangers wrote: files of checkpoints, settings, answers of other servers."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:  # Any: JSON
    """Return the value. Raises ValueError, also if it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
