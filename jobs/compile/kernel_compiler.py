"""Compiles kernels into Triton's cache, in processes of its own."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ...cluster.errors import ConfigError, brief, first_line
from .pretended_gpu import KernelForm

Kernel = JITFunction[Any]  # Any: a kernel has no type of its own


@dataclass(frozen=True, slots=True)
class CachedKernel:
    """A kernel in the cache.

    Attributes:
        was_there: it was not compiled now.
        num_bytes: size of its files.
    """

    was_there: bool
    num_bytes: int


class KernelCompiler:
    """Compiles for one target. Leaving its context ends the processes.

    `on_compiled` is called after each kernel, in another thread.
    """

    def __init__(self, target: GPUTarget, num_processes: int, on_compiled: Callable[[], None]) -> None:
        self._target, self._on_compiled = target, on_compiled
        copyreg.pickle(JITFunction, _reduce)
        # Not forked: a fork would have what is pretended, and perhaps a lock that another thread holds.
        self._pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _store_binaries_alone)
        self._kernels: list[tuple[str, Future[CachedKernel]]] = []

    def submit(self, form: KernelForm) -> None:
        done = self._pool.submit(_compile, form, self._target)
        done.add_done_callback(lambda _: self._on_compiled())
        self._kernels.append((form.name, done))

    def wait(self) -> list[CachedKernel]:
        """Return all kernels once they are compiled. Raises ConfigError for one that is not."""
        return [self._result(name, done) for name, done in self._kernels]

    def _result(self, name: str, done: Future[CachedKernel]) -> CachedKernel:
        try:
            return done.result()
        except BrokenProcessPool:
            raise ConfigError(
                "jobs: a process that compiled was killed, perhaps for want of memory. Lower --jobs.",
                param="jobs",
            ) from None
        except Exception as error:  # Triton's, LLVM's and ptxas' own
            raise ConfigError(
                f"gpu: {name} cannot be compiled for sm_{self._target.arch}, so these settings would fail on "
                f"this GPU, too: {brief(first_line(error), 300)}",
                param="gpu",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _reduce(kernel: Kernel) -> tuple[Callable[..., Kernel], tuple[str, str]]:
    """Pickle a kernel as its name."""
    return _kernel_of, (kernel.fn.__module__, kernel.fn.__qualname__)


def _kernel_of(module: str, name: str) -> Kernel:
    return operator.attrgetter(name)(import_module(module))


def _store_binaries_alone() -> None:
    """Leave intermediate forms out of the cache, which are five times as large and never read."""
    knobs.compilation.store_binary_only = True


def _compile(form: KernelForm, target: GPUTarget) -> CachedKernel:
    """Compile as `JITFunction._do_compile` does, unless the cache has the kernel."""
    seen: list[dict[str, Any]] = []
    form.kernel.hash = form.digest
    knobs.compilation.listener = lambda **compilation: seen.append(compilation)
    source = ASTSource(form.kernel, form.signature, form.constants, form.attributes)
    triton.compile(source, target=target, options=form.options)
    (found,) = seen
    return CachedKernel(
        found["cache_hit"], sum(Path(file).stat().st_size for file in found["metadata_group"].values())
    )
