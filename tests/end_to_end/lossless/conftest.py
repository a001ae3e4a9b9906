"""Tests of a pair share its plain decoding, so that one process runs them."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "pair" in item.callspec.params:
        item.add_marker(pytest.mark.xdist_group(f"lossless {item.callspec.params['pair']}"))
