"""Tests of `manta serve`, over real Ray Serve: one process runs them one after the other."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xdist_group("servers"))
