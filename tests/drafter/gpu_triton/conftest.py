"""Fixtures of the GPU kernels' tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from support.engines.devices import Launches, launch_in_turns, watch_launches


@pytest.fixture(autouse=True)
def seeded() -> None:
    """PyTorch's random numbers are the same in every test."""
    torch.manual_seed(0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels by name with their keyword arguments (compile-time constants), in order of their launches."""
    found: Launches = []

    def watch(kernel: str, constants: Mapping[str, object], launch: Callable[[], object]) -> object:
        found.append((kernel, constants))
        return launch()

    watch_launches(monkeypatch, watch)
    return found


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads launch in turns: Triton's interpreter is not thread-safe."""
    launch_in_turns(monkeypatch)
