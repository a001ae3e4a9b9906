"""Which instructions this CPU has for products of bf16, and leave to use them.

AMX's registers are given to a process only on request (Linux's `arch_prctl`), which is made when a backend is
chosen or code is compiled or read from the disk, never by an import. Asked by `compiled/` and `elements.py`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from enum import Enum
from functools import cache

from llvmlite import binding

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # x86-64's numbers


class Instructions(Enum):
    """How tiles of bf16 are multiplied; the sums differ in their last bits."""

    AMX = "amx"
    AVX512 = "avx512_bf16"


@cache
def bf16_instructions() -> Instructions | None:
    """The best that Numba may compile for and the system lets us use; None: leave products to oneDNN."""
    features = _features()
    if not {"avx512f", "avx512bw", "avx512vl", "avx512bf16"} <= features:
        return None
    if {"amx-tile", "amx-bf16"} <= features and _may_use_tiles():
        return Instructions.AMX
    return Instructions.AVX512


def _features() -> set[str]:
    """As Numba sees them: NUMBA_CPU_FEATURES goes before what the CPU says."""
    if platform.machine() != "x86_64":
        return set()
    stated = os.environ.get("NUMBA_CPU_FEATURES")
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    return {name for name, has in binding.get_host_cpu_features().items() if has}


def _may_use_tiles() -> bool:
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
