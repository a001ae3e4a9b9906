"""Records what a start does on a pretended GPU, and what is wrong with it.

`Recording` holds what a capture forbids: reads by the host, copies from or to it, masks as indices, events,
waits, and kernels that were never specialized before; and work on two streams that nothing orders. It counts
the bytes of tensors. Copies from and to pinned memory are made as late as events allow
(`pretended_memory.py`).
"""

from __future__ import annotations

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from manta.cluster.hardware.gpu_specs import GPUS
from manta.jobs.compile.pretended_gpu import KernelForm, PretendedGpu
from torch.utils._pytree import tree_leaves

from ..paths import ROOT
from .pretended_memory import DeviceMemory, PinnedMemory

_NO_LAUNCH = re.compile(r"empty|_unsafe_view|^prim\.")  # operators beside views
_OF_CONTEXT = 2**29  # bytes of a process's CUDA context
_READ_BY_HOST = frozenset(
    f"aten.{name}"
    for name in (
        *("item", "_local_scalar_dense", "equal", "is_nonzero"),
        *("tolist", "unique", "nonzero", "masked_select", "__bool__"),
    )
)
_COPIES = frozenset(
    f"aten.{name}" for name in ("copy_", "_to_copy", "to", "index", "index_put", "index_put_")
)
_OF_PRETENCE = ("/rehearsal/", "jobs/compile/")


class Recording(PretendedGpu):
    """What a start did on a pretended H200.

    Attributes:
        begun, done: how much work each stream has got, and how much of it the host has waited for.
        beside: while work may run beside later steps: how much each stream had got that it must follow.
        num_waits: how often the host has waited.
        capture: launches of the graph that is being captured; None outside of captures.
        graphs: launches by kernel, and by operator of PyTorch, of each captured graph.
        variants: keys by kernel for which Triton would compile it.
        new_in_capture: kernels that were first specialized within a capture.
        violations: what captures forbid, with its place.
        host_reads: places outside of captures where the host waits for a value.
    """

    def __init__(self) -> None:
        super().__init__(GPUS["h200"])
        self.memory, self.pinned_memory = DeviceMemory(_OF_CONTEXT), PinnedMemory()
        self.begun, self.done = Counter[int](), Counter[int]()
        self.beside: Counter[int] | None = None
        self.num_waits = 0
        self.capture: Counter[str] | None = None
        self.graphs: list[Counter[str]] = []
        self.variants = defaultdict[str, set[Any]](set)
        self.new_in_capture, self.violations, self.host_reads = Counter[str](), Counter[str](), Counter[str]()

    def on_specialized(self, form: KernelForm) -> None:
        self.variants[form.name].add(form.key)
        if self.capture is not None:
            self.new_in_capture[form.name] += 1

    def on_launch(self, name: str, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        tensors = (each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor))
        if any(each.device.type != "cuda" for each in tensors):
            self.violations[f"a launch gets a tensor of the host: {place()}"] += 1
        if min(grid) < 0 or max(grid[1:], default=0) > 65_535:
            self.violations[f"a grid of {grid}: {place()}"] += 1
        if self.capture is not None:
            self.capture[name] += 1

    def on_work(self) -> None:
        if self.capture is None:
            before = self.begun if self.beside is None else self.beside
            if any(count > self.done[each] for each, count in before.items() if each != self.stream):
                self.violations[f"work on two streams that nothing orders: {place()}"] += 1
            self.begun[self.stream] += 1

    def on_operator(
        self, name: str, tensors: list[torch.Tensor], args: Sequence[Any], to: str | None
    ) -> None:
        sources = {each.device.type for each in tensors if each.dim() > 0}
        if name in _READ_BY_HOST and any(each.device.type == "cuda" for each in tensors):
            self.on_host_call(f"{name} makes the host wait")
        if name in _COPIES and len(sources | ({to} if to and sources else set())) > 1:
            self.on_host_call(f"{name} between host and device")
        if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], list | tuple):
            masks = [each for each in args[1] if isinstance(each, torch.Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in masks):
                self.on_host_call(f"{name} by a mask")

    def on_host_read(self) -> None:
        self.host_reads[place()] += 1
        self.wait_for_all()

    def on_computed(self, name: str) -> None:
        if self.capture is not None and not _NO_LAUNCH.search(name):
            self.capture[name] += 1

    def on_copy(self, host: torch.Tensor, *, to_host: bool) -> None:
        self.pinned_memory.begin(host, self.stream, self.begun[self.stream], to_host=to_host)

    def on_allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        self.memory.add(tensors, self.stream)

    def on_host_call(self, what: str) -> None:
        if self.capture is not None:
            self.violations[f"{what} in a capture: {place()}"] += 1

    def mark(self, stream: int) -> tuple[int, int]:
        return stream, self.begun[stream]

    def wait(self, mark: tuple[int, int]) -> None:
        stream, number = mark
        self.num_waits += 1
        self.done[stream] = max(self.done[stream], number)
        self.pinned_memory.end(stream, number)

    def wait_for_all(self) -> None:
        for mark in list(self.begun.items()):
            self.wait(mark)

    def begin_capture(self, pool: object) -> None:
        super().begin_capture(pool)
        self.capture, self.memory.pool = Counter(), pool

    def end_capture(self) -> None:
        assert self.capture is not None, "a capture has begun"
        self.graphs.append(self.capture)
        self.capture = self.memory.pool = None
        super().end_capture()

    def empty_cache(self, kept_pools: Collection[object]) -> None:
        self.memory.give_back(kept_pools)

    def used_bytes(self) -> int:
        return self.memory.used_bytes()

    def pinned(self, *args: Any, **more: Any) -> torch.Tensor:
        return self.pinned_memory.allocate(*args, **more)


def place(num_lines: int = 3) -> str:
    """Return the innermost lines of the repository that are being run, innermost first."""
    frames = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack())
        if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename
    ]
    return " < ".join([each for each in frames if not any(part in each for part in _OF_PRETENCE)][:num_lines])
