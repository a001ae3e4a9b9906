"""Provenance of a figure: command, machine, versions, commit. Part of every benchmark file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....actors.system.host_resources import cpu_facts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LIBRARIES = ("torch", "triton", "ray", "transformers", "numpy")


def provenance() -> dict[str, object]:
    """Return facts about this process and machine; a library that is not installed has version null."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu_name(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def options_json(options: DataclassInstance) -> dict[str, Any]:  # Any: JSON
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}


def cpu_model() -> str:
    facts = cpu_facts()
    flags = facts.get("flags", "").split()
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(fast) or 'no AVX2'})"


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
