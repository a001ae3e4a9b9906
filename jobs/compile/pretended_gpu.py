"""A pretended GPU, on which the GPU path runs from loading to its last capture without a GPU.

CUDA tensors are PyTorch's fake ones: shapes without memory. Launches are specialized by Triton as on a GPU,
and not run; streams, events and captures do nothing. A `PretendedGpu` is told of everything: `manta compile`
compiles what is specialized, and the rehearsal of the tests (`tests/support/rehearsal`) checks the rest.

`pretend` changes torch and Triton for the whole process, so a program of its own calls it, before it imports
modules that look for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from ...cluster.hardware.gpu_specs import Gpu
from .device_guard import load_device_guard

# Any in this module: arguments of PyTorch's and Triton's functions, which are replaced.
_MOVES = ("aten.to", "aten._to_copy")
_ANSWERED = frozenset(f"aten.{name}" for name in ("item", "_local_scalar_dense", "equal", "is_nonzero"))


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel as Triton compiles it for some launches.

    Attributes:
        key: of the form, among those of this kernel.
        digest: Triton's, of the kernel's source and constants. It depends on which kernels had one before in
            the process (`DependenciesFinder` takes constants of a callee only if that has one), so it is
            taken here, in the order of a start.
        signature: types by argument.
        constants, attributes: values of constants, and what is known of other arguments, by their places.
        options: fields of the backend's options.
    """

    kernel: jit.JITFunction[Any]
    key: object
    digest: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    options: Mapping[str, Any]
    attributes: Mapping[Any, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class PretendedGpu:
    """What happens on a pretended GPU. Nothing is recorded here: subclasses override what they need.

    Attributes:
        gpu: the GPU that is pretended.
        stream: number of the current stream.
        pool: memory pool of the capture in progress; None outside of captures.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, 0
        self.pool: object = None

    @property
    def target(self) -> GPUTarget:
        major, minor = self.gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def on_specialized(self, form: KernelForm) -> None:
        """A kernel is launched in a form that Triton would compile now."""

    def on_launch(self, name: str, grid: tuple[int, ...], arguments: Sequence[Any]) -> None: ...

    def on_work(self) -> None:
        """The current stream gets an operator or a launch."""

    def on_operator(
        self, name: str, tensors: list[torch.Tensor], args: Sequence[Any], to: str | None
    ) -> None:
        """An operator has a CUDA tensor or makes one. `to`: the type of a device among its arguments."""

    def on_host_read(self) -> None:
        """The host reads values, and gets zeros, False, or that tensors are equal."""

    def on_computed(self, name: str) -> None:
        """An operator computes values, or allocates their memory."""

    def on_copy(self, host: torch.Tensor, *, to_host: bool) -> None:
        """Values are copied from or to a tensor of the host."""

    def on_allocated(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def on_host_call(self, what: str) -> None:
        """The host calls the runtime in a way that captures forbid."""

    def mark(self, stream: int) -> Any:
        """Return the place that a stream has reached, for `wait`."""

    def wait(self, mark: Any) -> None: ...

    def wait_for_all(self) -> None: ...

    def begin_capture(self, pool: object) -> None:
        assert self.pool is None, "captures are not nested"
        self.pool = pool

    def end_capture(self) -> None:
        self.pool = None

    def empty_cache(self, kept_pools: Collection[object]) -> None:
        """Free what no tensor uses, but for these pools, which live graphs read."""

    def used_bytes(self) -> int:
        return 0

    def pinned(self, *args: Any, **more: Any) -> torch.Tensor:
        """Return what `torch.empty` returns, in pinned memory."""
        return torch.empty(*args, **more)


def pretend(gpu: PretendedGpu) -> None:
    """Make torch and Triton believe in a GPU. Raises ConfigError without a C++ compiler, if one is needed."""
    load_device_guard()
    torch._C._set_only_lift_cpu_tensors(True)
    _pretend_runtime(gpu)
    _pretend_tensors(gpu)
    _pretend_launches(gpu)


@contextmanager
def fake_tensors(gpu: PretendedGpu) -> Iterator[None]:
    """Make CUDA tensors fake, and run operators on the host's own tensors for real."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Operators(gpu):
        yield


def _pretend_runtime(gpu: PretendedGpu) -> None:
    """Replace torch.cuda's device, streams, events and graphs by ones that only report to `gpu`."""

    class Event:
        """Is done when it is asked for the second time."""

        def __init__(self, *_: object, **__: object) -> None:
            self._mark, self._is_asked = gpu.mark(0), True

        def record(self, *_: object) -> None:
            gpu.on_host_call("an event is recorded")
            self._mark, self._is_asked = gpu.mark(gpu.stream), False

        def query(self) -> bool:
            if self._is_asked:
                gpu.wait(self._mark)
                return True
            self._is_asked = True
            return False

        def synchronize(self) -> None:
            gpu.on_host_call("an event is waited for")
            gpu.wait(self._mark)

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = next(numbers)

        def synchronize(self) -> None:
            gpu.on_host_call("a stream is waited for")
            gpu.wait(gpu.mark(self.number))

    class Graph:
        def __init__(self, *_: object, **__: object) -> None:
            self.pool: object = None

        def capture_begin(self, pool: object, **__: object) -> None:
            gpu.begin_capture(pool)
            self.pool = pool
            graphs.add(self)

        def capture_end(self) -> None:
            gpu.end_capture()

        def replay(self) -> None:
            gpu.on_work()

    numbers, graphs = count(1), WeakSet[Graph]()

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, stream.number
        yield
        gpu.stream = before

    def synchronize(*_: object) -> None:
        gpu.on_host_call("the device is waited for")
        gpu.wait_for_all()

    def empty_cache() -> None:
        gpu.on_host_call("the allocator's cache is emptied")
        gpu.empty_cache({graph.pool for graph in graphs})

    spec = gpu.gpu
    properties = SimpleNamespace(
        name=spec.name,
        major=spec.capability[0],
        minor=spec.capability[1],
        multi_processor_count=spec.processors,
        total_memory=spec.memory_bytes,
    )
    pretended: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda *_: spec.capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: spec.name,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "mem_get_info": lambda *_: (spec.memory_bytes - gpu.used_bytes(), spec.memory_bytes),
        "is_current_stream_capturing": lambda: gpu.pool is not None,
        "graph_pool_handle": lambda: ("pool", next(numbers)),
        "current_stream": lambda *_: Stream(),
        "stream": on_stream,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)


def _pretend_tensors(gpu: PretendedGpu) -> None:
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
            return gpu.pinned(*args, **more)

    for name in ("randn", "rand", "randint"):
        setattr(torch, name, unseeded(getattr(torch, name)))
    torch.Generator = Generator  # pyright: ignore[reportAttributeAccessIssue]
    torch.empty = empty_or_pinned


def _pretend_launches(gpu: PretendedGpu) -> None:
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu.target,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType]
    bases: dict[int, int] = {}  # addresses by storage, with the alignment of an allocator's
    run = jit.JITFunction.run

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
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
        gpu.on_launch(kernel.fn.__name__, size, (*args, *more.values()))
        gpu.on_work()
        with unset_fake_temporarily():
            more = {name: argument(value) for name, value in more.items()}
            return run(kernel, *map(argument, args), grid=size, warmup=True, **more)

    def specialize(
        kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, *more: Any
    ) -> Any:
        digest = kernel.cache_key
        gpu.on_specialized(KernelForm(kernel, key, digest, signature, constants, options.__dict__, more[0]))
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


class _Operators(TorchDispatchMode):
    """Runs operators on the host's own tensors for real, and others on shapes."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func._overloadpacket)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device)]
        to = devices[0].type if devices else None
        if to != "cuda" and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self._gpu.on_operator(name, tensors, args, to)
        if name in _ANSWERED:
            self._gpu.on_host_read()
            return name == "aten.equal" or (0 if tensors[0].dtype is not torch.bool else False)
        if name in _MOVES and to == "cpu" and args[0].device.type == "cuda":
            self._gpu.on_host_read()
            dtypes = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
            with unset_fake_temporarily():
                return torch.zeros(args[0].shape, dtype=dtypes[0] if dtypes else args[0].dtype)
        self._gpu.on_work()
        if not func.is_view:
            self._gpu.on_computed(name)
        if name == "aten.copy_":
            for host in (each for each in args[:2] if not isinstance(each, FakeTensor)):
                self._gpu.on_copy(host, to_host=host is args[0])
            if not isinstance(args[0], FakeTensor):
                return args[0]
        made = func(*tree_map(_as_fake, args), **tree_map(_as_fake, kwargs))
        found = (each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        self._gpu.on_allocated([each for each in found if each.device.type == "cuda"])
        return made


def _as_fake(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return value
