"""Where kernel tests run: the environment variable MANTA_TEST_DEVICE.

    interpret   Triton's interpreter on the CPU (the default)
    cuda        a GPU

Imported by `conftest.py` before any kernel is: Triton reads TRITON_INTERPRET when it decorates one.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch

KIND = os.environ.get("MANTA_TEST_DEVICE", "interpret")
if KIND == "interpret":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from support.kernels import interpreter

        interpreter.prepare()
elif KIND == "cuda":
    os.environ.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available():
        raise pytest.UsageError("MANTA_TEST_DEVICE=cuda, but PyTorch sees no GPU.")
else:
    raise pytest.UsageError(f"MANTA_TEST_DEVICE={KIND!r} is not known. Choose one of: interpret, cuda.")

ON_GPU = KIND == "cuda"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Dtypes of 16 bits that products are computed in.
HALVES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16, torch.bfloat16)


# What is called in a launch's place: with a kernel's name, arguments by name and what launches it.
Watch = Callable[[str, Mapping[str, object], Callable[[], object]], object]
Launches = list[tuple[str, Mapping[str, object]]]


def watch_launches(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Call `watch` in place of every launch."""
    from triton import JITFunction
    from triton.runtime.interpreter import GridExecutor

    owner, method = (JITFunction, "run") if ON_GPU else (GridExecutor, "__call__")
    launch = getattr(owner, method)

    def watched(kernel: Any, *args: object, **kwargs: object) -> object:
        return watch(kernel.fn.__name__, kwargs, lambda: launch(kernel, *args, **kwargs))

    monkeypatch.setattr(owner, method, watched)


def launch_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads launch one after the other: Triton's interpreter is not thread-safe."""
    turn = threading.Lock()

    def launch_alone(name: str, arguments: object, launch: Callable[[], object]) -> object:
        with turn:
            return launch()

    watch_launches(monkeypatch, launch_alone)


def record_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace PyTorch's side of graph captures by a stand-in; return the list of its calls, which grows."""
    calls: list[str] = []

    class Graph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            assert capture_error_mode in ("global", "thread_local", "relaxed")
            calls.append(f"begin in {pool}")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    pools = (f"pool {number}" for number in itertools.count())
    stand_ins = {
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "graph_pool_handle": lambda: next(pools),
        "empty_cache": lambda: calls.append("emptied"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return calls
