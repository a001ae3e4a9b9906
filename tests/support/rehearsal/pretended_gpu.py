"""A pretended H200, on which the GPU path runs from loading to its last capture without a GPU.

CUDA tensors are PyTorch's fake ones: shapes without memory, of which the bytes are counted. Launches are
specialized by Triton as on a GPU, and not run. Streams, events and captures record. `Recording` holds what a
capture forbids: reads by the host, copies from or to it, masks as indices, events, waits, and kernels that
were never specialized before; and work on two streams that nothing orders. Copies from and to pinned memory
are made as late as events allow (`pretended_memory.py`).

`pretend_gpu` changes torch and Triton for the whole process, so a program of its own calls it.
"""

from __future__ import annotations

import ctypes
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from ..paths import ROOT
from .pretended_memory import DeviceMemory, PinnedMemory

_CAPABILITY, _MULTIPROCESSORS, _BYTES = (9, 0), 132, 150_110_011_392  # of an H200
_OF_CONTEXT = 2**29  # bytes of a process's CUDA context
_NO_LAUNCH = re.compile(r"empty|_unsafe_view|^prim\.")  # operators beside views
_ANSWERED = frozenset(f"aten.{name}" for name in ("item", "_local_scalar_dense", "equal", "is_nonzero"))
_OTHERS = ("tolist", "unique", "nonzero", "masked_select", "__bool__")
_READ_BY_HOST = _ANSWERED | {f"aten.{name}" for name in _OTHERS}
_COPIES = frozenset(
    f"aten.{name}" for name in ("copy_", "_to_copy", "to", "index", "index_put", "index_put_")
)


@dataclass
class Recording:
    """What a start did.

    Attributes:
        stream: the current stream.
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

    memory: DeviceMemory = field(default_factory=lambda: DeviceMemory(_OF_CONTEXT))
    pinned: PinnedMemory = field(default_factory=PinnedMemory)
    stream: int = 0
    begun: Counter[int] = field(default_factory=Counter[int])
    done: Counter[int] = field(default_factory=Counter[int])
    beside: Counter[int] | None = None
    num_waits: int = 0
    capture: Counter[str] | None = None
    graphs: list[Counter[str]] = field(default_factory=list[Counter[str]])
    variants: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    new_in_capture: Counter[str] = field(default_factory=Counter[str])
    violations: Counter[str] = field(default_factory=Counter[str])
    host_reads: Counter[str] = field(default_factory=Counter[str])

    def forbid(self, what: str) -> None:
        """Record a violation if a capture is in progress."""
        if self.capture is not None:
            self.violations[f"{what} in a capture: {place()}"] += 1

    def work(self) -> None:
        """Record that the current stream gets work."""
        if self.capture is None:
            before = self.begun if self.beside is None else self.beside
            if any(count > self.done[each] for each, count in before.items() if each != self.stream):
                self.violations[f"work on two streams that nothing orders: {place()}"] += 1
            self.begun[self.stream] += 1

    def wait(self, stream: int, number: int) -> None:
        """Record that the host waits for a stream's work up to this number."""
        self.num_waits += 1
        self.done[stream] = max(self.done[stream], number)
        self.pinned.end(stream, number)

    def wait_for_all(self) -> None:
        for stream, number in self.begun.items():
            self.wait(stream, number)


def place(num_lines: int = 3) -> str:
    """Return the innermost lines of the repository that are being run, innermost first."""
    frames = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack())
        if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename
    ]
    return " < ".join([each for each in frames if "/rehearsal/" not in each][:num_lines])


def pretend_gpu(recording: Recording, device_guard: Path) -> None:
    """Make torch and Triton believe in a GPU; `device_guard`: the compiled device_guard.cpp."""
    ctypes.CDLL(str(device_guard), ctypes.RTLD_GLOBAL)
    torch._C._set_only_lift_cpu_tensors(True)
    _pretend_runtime(recording)
    _pretend_tensors(recording.pinned)
    _pretend_launches(recording)


def _pretend_runtime(recording: Recording) -> None:
    class Event:
        """Is done when it is asked for the second time."""

        def __init__(self, *_: object, **__: object) -> None:
            self._work, self._is_asked = (0, 0), True

        def record(self, *_: object) -> None:
            recording.forbid("an event is recorded")
            self._work, self._is_asked = (recording.stream, recording.begun[recording.stream]), False

        def query(self) -> bool:
            if self._is_asked:
                recording.wait(*self._work)
                return True
            self._is_asked = True
            return False

        def synchronize(self) -> None:
            recording.forbid("an event is waited for")
            recording.wait(*self._work)

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = next(numbers)

        def synchronize(self) -> None:
            recording.forbid("a stream is waited for")
            recording.wait(self.number, recording.begun[self.number])

    class Graph:
        def __init__(self, *_: object, **__: object) -> None:
            self.pool: object = None

        def capture_begin(self, pool: object, **__: object) -> None:
            assert recording.capture is None, "captures are not nested"
            recording.capture, recording.memory.pool, self.pool = Counter(), pool, pool
            graphs.add(self)

        def capture_end(self) -> None:
            assert recording.capture is not None, "a capture has begun"
            recording.graphs.append(recording.capture)
            recording.capture = recording.memory.pool = None

        def replay(self) -> None:
            recording.work()

    numbers, graphs = count(1), WeakSet[Graph]()

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, recording.stream = recording.stream, stream.number
        yield
        recording.stream = before

    def synchronize(*_: object) -> None:
        recording.forbid("the device is waited for")
        recording.wait_for_all()

    def empty_cache() -> None:
        recording.forbid("the allocator's cache is emptied")
        recording.memory.give_back({graph.pool for graph in graphs})

    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=_MULTIPROCESSORS,
        total_memory=_BYTES,
    )
    pretended: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda *_: _CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "mem_get_info": lambda *_: (_BYTES - recording.memory.used_bytes(), _BYTES),
        "is_current_stream_capturing": lambda: recording.capture is not None,
        "graph_pool_handle": lambda: ("pool", next(numbers)),
        "current_stream": lambda *_: Stream(),
        "stream": on_stream,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)


def _pretend_tensors(pinned: PinnedMemory) -> None:
    """Make random numbers without a generator of the GPU, and pinned memory without a driver."""
    make_generator, empty = torch.Generator, torch.empty

    class Generator:
        def __new__(cls, device: Any = "cpu") -> Any:
            if torch.device(device).type == "cuda":
                return SimpleNamespace(manual_seed=lambda seed: None)
            return make_generator(device)

    def unseeded(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def random(*args: Any, generator: Any = None, **more: Any) -> torch.Tensor:
            if generator is not None and not isinstance(generator, SimpleNamespace):
                more["generator"] = generator
            return make(*args, **more)

        return random

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*args, **more)
        with unset_fake_temporarily():
            return pinned.allocate(*args, **more)

    for name in ("randn", "rand", "randint"):
        setattr(torch, name, unseeded(getattr(torch, name)))
    torch.Generator = Generator  # pyright: ignore[reportAttributeAccessIssue]
    torch.empty = empty_or_pinned


def _pretend_launches(recording: Recording) -> None:
    limits = {
        "max_shared_mem": 232_448,
        "multiprocessor_count": _MULTIPROCESSORS,
        "max_num_regs": 65_536,
        "warpSize": 32,
    }
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 10 * _CAPABILITY[0] + _CAPABILITY[1], 32),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=lambda device: limits),
    )
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType]
    bases: dict[int, int] = {}  # addresses by storage, with the alignment of an allocator's
    run = jit.JITFunction.run

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cuda":
                recording.violations[f"a launch gets a tensor of the host: {place()}"] += 1
            storage = value.untyped_storage()
            base = bases.setdefault(storage._cdata, (len(bases) + 1) << 40)
            address = base + int(value.storage_offset()) * value.element_size()
            return _Pointer(value.dtype, address)
        if isinstance(value, tuple):
            values = map(argument, value)
            return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
        return value

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        given: Any = grid(more) if callable(grid) else grid
        size = (given,) if isinstance(given, int) else tuple(map(int, given))
        if min(size) < 0 or max(size[1:], default=0) > 65_535:
            recording.violations[f"a grid of {size}: {place()}"] += 1
        recording.work()
        if recording.capture is not None:
            recording.capture[kernel.fn.__name__] += 1
        with unset_fake_temporarily():
            more = {name: argument(value) for name, value in more.items()}
            return run(kernel, *map(argument, args), grid=size, warmup=True, **more)

    def specialize(kernel: Any, key: Any, signature: Any, device: int, *_: Any) -> Any:
        name = kernel.fn.__name__
        recording.variants[name].add(key)
        if recording.capture is not None:
            recording.new_in_capture[name] += 1
        compiled = SimpleNamespace(result=None)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    jit.JITFunction.run = launch  # pyright: ignore[reportAttributeAccessIssue]
    jit.JITFunction._do_compile = specialize  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class _Pointer:
    """What Triton asks of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class Watch(TorchDispatchMode):
    """Runs operators on the host's own tensors for real, and others on shapes; records what is forbidden."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func._overloadpacket)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device)]
        target = devices[0].type if devices else None
        if target != "cuda" and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self._check(name, tensors, args, target)
        if name in _ANSWERED:
            self._recording.host_reads[place()] += 1
            self._recording.wait_for_all()
            return name == "aten.equal" or (0 if tensors[0].dtype is not torch.bool else False)
        self._recording.work()
        if self._recording.capture is not None and not func.is_view and not _NO_LAUNCH.search(name):
            self._recording.capture[name] += 1
        if name == "aten.copy_":
            for host in (each for each in args[:2] if not isinstance(each, FakeTensor)):
                stream = self._recording.stream
                number = self._recording.begun[stream]
                self._recording.pinned.begin(host, stream, number, to_host=host is args[0])
            if not isinstance(args[0], FakeTensor):
                return args[0]
        made = func(*tree_map(_as_fake, args), **tree_map(_as_fake, kwargs))
        tensors = (each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        on_gpu = [each for each in tensors if each.device.type == "cuda"]
        self._recording.memory.add(on_gpu, self._recording.stream)
        return made

    def _check(self, name: str, tensors: list[torch.Tensor], args: Any, target: str | None) -> None:
        sources = {each.device.type for each in tensors if each.dim() > 0}
        if name in _READ_BY_HOST and any(each.device.type == "cuda" for each in tensors):
            self._recording.forbid(f"{name} makes the host wait")
        if name in _COPIES and len(sources | ({target} if target and sources else set())) > 1:
            self._recording.forbid(f"{name} between host and device")
        if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], list | tuple):
            masks = [each for each in args[1] if isinstance(each, torch.Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in masks):
                self._recording.forbid(f"{name} by a mask")


def _as_fake(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return value
