"""Launches of compiled kernels, recorded on a pretended GPU as Triton would specialize them.

The product's launch functions run on tensors in host memory, which say that they are on a GPU. Nothing is
computed: a launch ends when Triton's own code has made its signature, constants and options of the arguments.
For a process without Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

HOST = torch.device("cpu")
_MULTIPROCESSORS = 132
_DEVICE_OF, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, as far as the compiler sees it."""

    kernel: JITFunction[Any]
    options: Any
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments by name, those with a value of their own type in the signature included."""
        names = self.kernel.arg_names
        return {names[at]: value for (at, *_), value in self.constexprs.items()}

    @property
    def key(self) -> str:
        """Text that is equal for launches that are compiled to the same."""
        return repr((self.signature, self.constexprs, self.attributes, vars(self.options)))

    def compiled(self, capability: int) -> CompiledKernel:
        source = ASTSource(self.kernel, self.signature, self.constexprs, self.attributes)
        return compile(source, target=GPUTarget("cuda", capability, 32), options=vars(self.options))


class _PretendedGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU: one for each capability, for functions that cache by device."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._device = torch.device("cuda", capability)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            return self._device
        if func == _IS_CUDA:
            return True
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_on_host, args), **kwargs)


def _on_host(value: object) -> object:
    return HOST if isinstance(value, torch.device) and value.type == "cuda" else value


def record(call: Callable[[torch.device], object], capability: int) -> list[Launch]:
    """Return the launches of a call that is given a device of this compute capability."""
    backend, launches = make_backend(GPUTarget("cuda", capability, 32)), list[Launch]()

    def launch(kernel: JITFunction[Any], *args: object, grid: object, warmup: bool, **given: object) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        arguments, specialization, options = bind(*args, **given)
        launches.append(
            Launch(kernel, *kernel._pack_args(backend, given, arguments, specialization, options))
        )

    device = torch.device("cuda", capability)
    properties = SimpleNamespace(multi_processor_count=_MULTIPROCESSORS)
    with (
        patch.object(JITFunction, "run", launch),
        patch.object(torch.cuda, "get_device_capability", lambda device: divmod(device.index, 10)),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(torch.cuda, "Event", MagicMock()),
        _PretendedGpu(capability),
    ):
        call(device)
    return launches
