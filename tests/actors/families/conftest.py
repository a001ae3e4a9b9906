"""Tiny targets that the tests of families share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints.tiny import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny target, which is made once; no test changes it."""
    return cache(lambda family: make_tiny_target(tmp_path_factory.mktemp(family), family))
