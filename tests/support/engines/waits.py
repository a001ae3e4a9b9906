"""Detect operations that make the host wait for its device: `counting_waits()`.

On a GPU PyTorch detects them (`torch.cuda.set_sync_debug_mode`). On a CPU, where kernels run in Triton's
interpreter, a device is simulated: its memory is what existed before, and the results of operators. Then
everything that reads a value (`item`, `nonzero`, `tolist`, ...) waits, and so does an operator with other
memory as input: a new array would be copied to the device, unpinned.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from support.engines.devices import ON_GPU

_ASKS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
}
_ASKING_OPERATORS = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select")}


class _Counter:
    """The findings so far; nothing is recorded while a kernel is interpreted, which may read anything."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.in_kernel = False
        self._kept: dict[int, torch.Tensor] = {}  # by address, so that it is not used again
        self.keep([x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)])

    def found(self, what: str) -> None:
        if not self.in_kernel:
            self.waits.append(what)

    def check(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        by_mask = name == "aten::index" and any(x.dtype is torch.bool for x in inputs[1:])
        if name in _ASKING_OPERATORS or by_mask:
            self.found(name)
        if any(x.numel() and x.untyped_storage().data_ptr() not in self._kept for x in _strided(inputs)):
            self.found(f"{name} of memory that is neither the device's nor pinned")

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark these as being on the device."""
        self._kept.update((x.untyped_storage().data_ptr(), x) for x in _strided(tensors))


def _strided(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Omit weights that a CPU's products have packed."""
    return [x for x in tensors if x.layout is torch.strided]


class _Methods(TorchFunctionMode):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ASKS:
            self._counter.found(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._counter.check(func._schema.name, inputs)
        outputs = func(*args, **(kwargs or {}))
        self._counter.keep([x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)])
        return outputs


@contextmanager
def counting_waits() -> Iterator[list[str]]:
    """Names of operations that would wait, as they are found; on a GPU the first one is an error."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield []
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    counter, launch = _Counter(), GridExecutor.__call__

    def interpret(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        counter.in_kernel = True
        try:
            launch(self, *args, **kwargs)
        finally:
            counter.in_kernel = False

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", interpret))
        stack.enter_context(_Methods(counter))
        stack.enter_context(_Operators(counter))
        yield counter.waits
