"""Lets PyTorch make fake tensors on a CUDA device that is not there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension

from ...cluster.errors import ConfigError, brief

# Of all devices' guards PyTorch without CUDA has the CPU's alone.
_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace {
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
"""
_COMPILERS = ("c++", "g++", "clang++")


def load_device_guard() -> None:
    """Load a guard of CUDA devices, compiled here, unless fake tensors work with PyTorch's own.

    PyTorch with CUDA has one, which ours replaces where that asks for a driver. Raises ConfigError without a
    C++ compiler.
    """
    if _makes_fake_tensors():
        return
    with TemporaryDirectory() as folder:
        ctypes.CDLL(str(compile_guard(Path(folder))), ctypes.RTLD_GLOBAL)


def _makes_fake_tensors() -> bool:
    try:
        with FakeTensorMode():
            torch.ones(2, device="cuda")[None]  # indexing asks the guard
    except (RuntimeError, AssertionError):  # PyTorch is not built for CUDA, or there is no driver
        return False
    return True


def compile_guard(folder: Path) -> Path:
    """Return the guard as a library. Raises ConfigError without a C++ compiler, or one that fails."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ConfigError(
            "gpu: this PyTorch needs a C++ compiler to pretend a GPU, and there is no c++, g++ or clang++. "
            "Install one (apt-get install g++).",
            param="gpu",
        )
    source, library = folder / "device_guard.cpp", folder / "device_guard.so"
    source.write_text(_SOURCE, encoding="utf-8")
    of_torch = cpp_extension.library_paths()[0]
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", "-o", str(library), str(source)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{of_torch}", "-lc10", f"-Wl,-rpath,{of_torch}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"gpu: {compiler} cannot compile with PyTorch's headers, which pretending a GPU needs: "
            f"{brief(done.stderr, 300)}. Install a C++20 compiler with its library (apt-get install g++).",
            param="gpu",
        )
    return library
