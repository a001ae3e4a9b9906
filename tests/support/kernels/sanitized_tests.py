"""Which tests run their kernels under the sanitizer: those marked `sanitized`, all if MANTA_SANITIZE is set.

A test whose launches have findings fails. Into the file that $MANTA_ORDERS names, each test appends which
barriers and ordering atomics it ran, and whether it shows a fault without each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..engines.devices import ON_GPU

_ALL = bool(os.environ.get("MANTA_SANITIZE"))
_ORDERS = os.environ.get("MANTA_ORDERS")


@contextmanager
def sanitized(item: pytest.Item) -> Iterator[None]:
    """Judge the launches of a test, if it is one whose launches are judged."""
    if ON_GPU or not (_ALL or item.get_closest_marker("sanitized")):
        yield
        return
    from .sanitizer import Sanitizer

    sanitizer = Sanitizer(mutate=_ORDERS is not None)
    with sanitizer.installed():
        yield
    if _ORDERS is not None:
        with Path(_ORDERS).open("a") as file:
            file.writelines(f"{json.dumps([*line, found])}\n" for line, found in sanitizer.needed.items())
    assert not sanitizer.findings, "\n".join(sanitizer.findings)
