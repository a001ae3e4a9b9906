"""Finds the C compiler and headers with which Triton builds its launchers; imports no Triton."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

REMEDY = "install gcc (or clang, or set CC) and Python's headers (python3-dev)"


def find_compiler() -> str | None:
    """Return the C compiler that Triton uses, in its order; None without any."""
    given = os.environ.get("CC")
    return shutil.which(given) if given is not None else shutil.which("gcc") or shutil.which("clang")


def why_not_launch() -> str | None:
    """Return what a kernel's first launch lacks, in words that follow a backend's name, or None."""
    if find_compiler() is None:
        return f"needs a C compiler to build its launchers: {REMEDY}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"needs Python.h to build its launchers: {REMEDY}"
    return None
